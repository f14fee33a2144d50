"""The form that an output must have, as a user asks for it.

A field of `SamplingParams` (which is where users import it from); read by
`engine/input_processor.py`. Imports no torch.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vllm.errors import RequestError
from vllm.utils.field_checks import check_text, parse_json_schema, parse_list, parse_switch


class GuidedDecodingParams(msgspec.Struct, omit_defaults=True):
    """A form that the output must have; at most one of the first five fields.

    Attributes:
        json: JSON schema, as text or as a dict.
        regex: regular expression that the whole output matches.
        choice: the output is one of these strings.
        grammar: context-free grammar, Lark or GBNF/EBNF text.
        json_object: any JSON object.
        backend: accepted for compatibility; every form is served by one library.
        whitespace_pattern: regular expression of the white space allowed inside JSON.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    backend: str | None = None
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        self.json = parse_json_schema(self.json)
        self.choice = parse_list(self.choice, "guided_choice", str)
        if self.json_object is not None:
            self.json_object = parse_switch(self.json_object, "guided_json_object")
        check_text(self.regex, "guided_regex")
        check_text(self.grammar, "guided_grammar")
        check_text(self.backend, "guided_decoding_backend")
        check_text(self.whitespace_pattern, "guided_whitespace_pattern")
        given = self.given_forms()
        if len(given) > 1:
            raise RequestError(
                f"only one form of structured output can be asked for, but these were given: "
                f"{', '.join(given)}; leave one",
                param="guided_decoding",
            )

    def given_forms(self) -> list[str]:
        """Return the names of the forms that are set."""
        forms: list[tuple[str, object]] = [
            ("json", self.json),
            ("regex", self.regex),
            ("choice", self.choice),
            ("grammar", self.grammar),
            ("json_object", self.json_object or None),
        ]
        return [name for name, value in forms if value is not None]

    @classmethod
    def from_optional(
        cls,
        json: str | dict[str, Any] | type | Any | None = None,
        regex: str | None = None,
        choice: list[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        backend: str | None = None,
        whitespace_pattern: str | None = None,
    ) -> GuidedDecodingParams | None:
        """Build from values that may be None; a pydantic model or class stands for its schema.

        Returns: None when no form is given at all.
        """
        if json is None and not (regex or choice or grammar or json_object):
            return None
        return cls(
            json=parse_json_schema(json),
            regex=regex,
            choice=choice,
            grammar=grammar,
            json_object=json_object,
            backend=backend,
            whitespace_pattern=whitespace_pattern,
        )
