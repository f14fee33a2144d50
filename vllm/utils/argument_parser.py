"""The command line: underscores or dashes, YAML files, true/false flags, hints for typing errors.

Used by every `vllm` command. Knows nothing about the flags themselves.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_AUTO = "auto"
# How much of two names is alike, from 0 to 1, so that one is offered for the other: --port for
# --prot (0.75), nothing for what shares single letters or a word of several.
_CLOSE = 0.75


def parse_bool(text: str) -> bool:
    """Return the truth value that `text` spells; raises argparse.ArgumentTypeError otherwise."""
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")


def _parse_bool_or_auto(text: str) -> bool | None:
    if text.strip().lower() == _AUTO:
        return None
    try:
        return parse_bool(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected true, false or auto, got {text!r}") from None


def parse_positive(text: str) -> int:
    """Return a number of at least 1; raises argparse.ArgumentTypeError otherwise."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


class StoreBoolean(argparse.Action):
    """A switch: `--x`, `--no-x`, `--x true`, `--x=false`; `--x auto` where the default is None."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, default: bool | None = False, **kwargs: Any
    ) -> None:
        """Add the `--no-` form of every long option."""
        every = list(option_strings)
        every += [f"--no-{o[2:]}" for o in option_strings if o.startswith("--")]
        kwargs.pop("nargs", None)
        kwargs["type"] = _parse_bool_or_auto if default is None else parse_bool
        super().__init__(every, dest, nargs="?", const=True, default=default, **kwargs)

    @property
    def words(self) -> str:
        """The values that it takes, for messages."""
        return "true or false" if self.type is parse_bool else "true, false or auto"

    def reads(self, text: str) -> bool:
        """Whether `text` behind the switch is its value; anything else is a positional."""
        lowered = text.lower()
        return lowered in (*_TRUE, *_FALSE) or (lowered == _AUTO and self.type is not parse_bool)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the value, turned round for the `--no-` form."""
        negated = (option_string or "").startswith("--no-")
        setattr(namespace, self.dest, None if values is None else bool(values) is not negated)


class _Formatter(argparse.HelpFormatter):
    """Shows defaults, and switches by the names that change something, without their value."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        hidden: tuple[Any, ...] = (None, "", [], argparse.SUPPRESS, False)
        if "%(default)" in text or any(action.default is h or action.default == h for h in hidden):
            return text
        return f"{text} (default: %(default)s)" if action.option_strings else text

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, StoreBoolean):
            is_off = action.default is False
            names = action.option_strings
            return ", ".join(n for n in names if not (is_off and n.startswith("--no-")))
        return super()._format_action_invocation(action)

    def add_usage(self, usage: str | None, *args: Any, **kwargs: Any) -> None:
        """Keep the usage line short: the options are listed by group below it."""
        super().add_usage(usage or "%(prog)s [options]", *args, **kwargs)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser in which `--max_model_len` and `--max-model-len` are one.

    A parser that declares `--config` reads that YAML file: a flat mapping of flag names to values.
    Flags on the command line win over the file, the file wins over defaults. True and false work
    for switches, lists for flags that take several values.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what ArgumentParser takes."""
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(*args, **kwargs)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse, and explain flags that do not exist."""
        given = sys.argv[1:] if args is None else list(args)
        parsed, unknown = self.parse_known_args(given, namespace)
        if unknown:
            self.error(self._explain_switch(given, unknown) or self._explain_unknown(unknown))
        return parsed

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Rewrite names to dashes, put the YAML file's flags in, then parse."""
        given = [_with_dashes(token) for token in (sys.argv[1:] if args is None else args)]
        if "--config" in self._option_string_actions:
            given = self._with_config_file(given)
        return super().parse_known_args(list(self._join_switches(given)), namespace)

    def _join_switches(self, args: list[str]) -> Iterator[str]:
        """Give every switch its value with `=`, so that it cannot swallow a positional."""
        position = 0
        while position < len(args):
            token = args[position]
            position += 1
            action = self._option_string_actions.get(token)
            if isinstance(action, StoreBoolean):
                has_value = position < len(args) and action.reads(args[position])
                yield f"{token}={args[position] if has_value else 'true'}"
                position += has_value
            else:
                yield token

    def _with_config_file(self, args: list[str]) -> list[str]:
        path = None
        for position, token in enumerate(args):
            if token == "--config":
                if position + 1 == len(args):
                    self.error("--config needs the path of a YAML file")
                found = args[position + 1]
            elif token.startswith("--config="):
                found = token.partition("=")[2]
            else:
                continue
            if path is not None:
                self.error("--config may be given once only")
            path = found
        if not path:
            return args
        options = next(i for i, token in enumerate(args) if token.startswith("-"))
        return [*args[:options], *self._flags_of_file(Path(path)), *args[options:]]

    def _flags_of_file(self, path: Path) -> list[str]:
        import yaml  # noqa: PLC0415  only needed where a file is given

        if path.suffix not in (".yaml", ".yml"):
            raise ValueError(f"--config must name a .yaml or .yml file, got {str(path)!r}")
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError) as cause:
            self.error(f"--config {path}: {cause}")
        if not isinstance(loaded, dict):
            self.error(
                f"--config {path}: expected `flag: value` lines, got {type(loaded).__name__}"
            )
        flags: list[str] = []
        for key, value in loaded.items():
            flags += self._flag_of_entry(path, str(key), value)
        return flags

    def _flag_of_entry(self, path: Path, key: str, value: Any) -> list[str]:
        name = "--" + key.replace("_", "-")
        action = self._option_string_actions.get(name)
        if action is None:
            self.error(f"--config {path}: {self._explain_unknown([name])}")
        if value is None:
            return []
        if isinstance(value, bool):
            if action.nargs == 0:  # a plain presence flag
                return [name] if value else []
            return [f"{name}={str(value).lower()}"]
        if isinstance(value, dict):
            return [f"{name}={json.dumps(value)}"]
        if isinstance(value, list):
            texts = [json.dumps(v) if isinstance(v, (dict, list)) else str(v) for v in value]
            if action.nargs in ("+", "*"):
                return [name, *texts]
            if isinstance(action, argparse._AppendAction):
                return [f"{name}={text}" for text in texts]
            return [f"{name}={json.dumps(value)}"]
        return [f"{name}={value}"]

    def _explain_switch(self, given: Sequence[str], unknown: Sequence[str]) -> str | None:
        """Return what is wrong with a word behind a switch that is no value of it, if one is."""
        known = self._all_options()
        for flag, word in pairwise(map(_with_dashes, given)):
            action = known.get(flag)
            if not isinstance(action, StoreBoolean) or word.startswith("-") or action.reads(word):
                continue
            if word in unknown:
                return f"{flag} takes {action.words}, or stands alone; got {word!r}"
            if not unknown[0].startswith("-"):  # the word took the place of this one
                return (
                    f"unrecognized arguments: {', '.join(unknown)} ({flag} takes {action.words}; "
                    f"{word!r} behind it was read as another argument)"
                )
        return None

    def _explain_unknown(self, unknown: Sequence[str]) -> str:
        known = {name.lstrip("-"): name for name in sorted(self._all_options())}
        parts = []
        for token in unknown:
            name = token.partition("=")[0]
            stems = [k for k in known if name.startswith("--no-") or not k.startswith("no-")]
            is_flag = name.startswith("-")
            near = is_flag and difflib.get_close_matches(name.lstrip("-"), stems, 1, _CLOSE)
            parts.append(f"{token} (did you mean {known[near[0]]}?)" if near else token)
        return f"unrecognized arguments: {', '.join(parts)}"

    def _all_options(self) -> dict[str, argparse.Action]:
        options = dict(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for child in action.choices.values():
                    if isinstance(child, FlexibleArgumentParser):
                        options |= child._all_options()
        return options

    def error(self, message: str) -> NoReturn:
        """Print one line and the way to the help, then exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n(see {self.prog} --help)\n")


def _with_dashes(token: str) -> str:
    if not token.startswith("--"):
        return token
    name, equals, value = token.partition("=")
    return name.replace("_", "-") + equals + value
