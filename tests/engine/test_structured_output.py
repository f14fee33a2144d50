"""Forms to masks: every kind compiled, followed to its end, and refused with a reason."""

from __future__ import annotations

import json
import random

import pytest

from tests.utils.fixtures_models import build_chain_tokenizer
from vllm.engine.input_processor import make_grammar_spec
from vllm.engine.messages import GrammarSpec, SetTokenizer
from vllm.engine.structured_output import StructuredOutput
from vllm.errors import RequestError
from vllm.sampling_params import GuidedDecodingParams
from vllm.sequence import SequenceResult
from vllm.types import FinishReason

VOCAB, EOS = 320, 264
TOKENIZER = build_chain_tokenizer()


def make_output() -> StructuredOutput:
    output = StructuredOutput(VOCAB)
    output.set_tokenizer(SetTokenizer(json=TOKENIZER.backend_tokenizer.to_str(), eos_token_id=EOS))
    return output


def allowed(mask: bytes) -> set[int]:
    bits = int.from_bytes(mask, "little")
    return {i for i in range(VOCAB) if bits >> i & 1}


def generate(spec: GrammarSpec, seed: int, max_tokens: int = 400) -> str | None:
    """Follow random allowed tokens to the end; None if it did not end."""
    output, rng = make_output(), random.Random(seed)
    output.add("r", output.start_compile(spec).result(10))
    ids: list[int] = []
    while len(ids) < max_tokens:
        mask = output.next_mask("r", 0)
        assert len(mask) == 40
        choices = allowed(mask)
        token = EOS if EOS in choices else rng.choice(sorted(choices))
        output.accept([SequenceResult(request_id="r", branch=0, token_ids=[token])])
        if token == EOS:
            return TOKENIZER.decode(ids)
        ids.append(token)
    return None


@pytest.mark.parametrize("seed", range(3))
def test_json_schema(seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    value = json.loads(generate(make_grammar_spec(GuidedDecodingParams(json=schema)), seed))
    assert set(value) == {"a", "b"}
    assert isinstance(value["a"], int)
    assert value["b"] in ("x", "y")


def test_json_object_and_white_space() -> None:
    output = make_output()
    output.add("r", output.start_compile(GrammarSpec(kind="json_object")).result(10))
    text = '{\n  "a": [1, true]\n}'
    output.accept([SequenceResult(request_id="r", branch=0, token_ids=list(text.encode()))])
    assert allowed(output.next_mask("r", 0)) == {EOS}
    strict = make_output()
    strict.add(
        "r",
        strict.start_compile(GrammarSpec(kind="json_object", whitespace_pattern="[ ]{0,1}")).result(
            10
        ),
    )
    strict.accept([SequenceResult(request_id="r", branch=0, token_ids=list(b"{ "))])
    assert not {32, 10} & allowed(strict.next_mask("r", 0))


def test_white_space_is_bounded_by_default() -> None:
    output = make_output()
    output.add("r", output.start_compile(GrammarSpec(kind="json_object")).result(10))
    output.accept([SequenceResult(request_id="r", branch=0, token_ids=list(b"{ "))])
    assert 32 not in allowed(output.next_mask("r", 0))


@pytest.mark.parametrize("seed", range(3))
def test_regex_choice_and_grammars(seed: int) -> None:
    assert generate(GrammarSpec(kind="regex", text="[ab]{3}-\\d"), seed)[3] == "-"
    choices = ["yes", 'no "quoted"', "ja\n", "中"]
    spec = make_grammar_spec(GuidedDecodingParams(choice=choices))
    assert generate(spec, seed) in choices
    lark = 'start: "a" inner "c"\ninner: "b" | "x"'
    gbnf = 'root ::= "a" inner "c"\ninner ::= "b" | "x"'
    for text in (lark, gbnf):
        assert generate(GrammarSpec(kind="grammar", text=text), seed) in ("abc", "axc")


def test_choices_that_begin_alike() -> None:
    output = make_output()
    output.add(
        "r",
        output.start_compile(make_grammar_spec(GuidedDecodingParams(choice=["A", "AB"]))).result(
            10
        ),
    )
    output.accept([SequenceResult(request_id="r", branch=0, token_ids=[65])])
    assert allowed(output.next_mask("r", 0)) == {EOS, 66}


def test_branches_go_their_own_ways() -> None:
    output = make_output()
    output.add("r", output.start_compile(GrammarSpec(kind="regex", text="ax|by")).result(10), 2)
    assert allowed(output.next_mask("r", 0)) == {97, 98}
    output.accept([SequenceResult(request_id="r", branch=b, token_ids=[97 + b]) for b in range(2)])
    assert allowed(output.next_mask("r", 0)) == {ord("x")}
    assert allowed(output.next_mask("r", 1)) == {ord("y")}
    output.end_branch("r", 1)
    assert "r" in output
    output.accept([SequenceResult("r", 0, [ord("x")], finish_reason=FinishReason.STOP)])
    assert "r" not in output, "it goes with its last answer"
    output.accept([SequenceResult(request_id="r", branch=0, token_ids=[97])])
    output.remove("r")


def test_tokens_after_the_end_are_ignored() -> None:
    output = make_output()
    output.add("r", output.start_compile(GrammarSpec(kind="regex", text="a")).result(10))
    output.accept([SequenceResult(request_id="r", branch=0, token_ids=[97, EOS, EOS])])
    assert allowed(output.next_mask("r", 0)) == {EOS}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec(kind="regex", text="[a-"), "guided_regex cannot be used.*unclosed"),
        (GrammarSpec(kind="regex", text="(?=a)b"), "look-around"),
        (GrammarSpec(kind="json", text='{"type": "nonsense"}'), "guided_json.*nonsense"),
        (GrammarSpec(kind="json", text="[1]"), "guided_json"),
        (GrammarSpec(kind="grammar", text="start: missing"), "unknown name"),
        (GrammarSpec(kind="grammar", text='root ::= ("a"'), "guided_grammar"),
    ],
)
def test_wrong_forms_are_refused_with_the_reason(spec: GrammarSpec, reason: str) -> None:
    with pytest.raises(RequestError, match="(?s)" + reason):
        make_output().start_compile(spec).result(10)


@pytest.mark.parametrize(
    "guided",
    [
        GuidedDecodingParams(choice=[]),
        GuidedDecodingParams(json="{"),
        GuidedDecodingParams(regex="  "),
    ],
)
def test_forms_that_are_no_forms(guided: GuidedDecodingParams) -> None:
    with pytest.raises(RequestError):
        make_grammar_spec(guided)


def test_no_tokenizer() -> None:
    with pytest.raises(RequestError, match="fast tokenizer"):
        StructuredOutput(VOCAB).start_compile(GrammarSpec(kind="json_object")).result(10)
