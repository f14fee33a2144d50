"""Ids to outputs without a model: stop strings, deltas, n, best_of, log-probabilities, failures."""

from __future__ import annotations

import random

import pytest

from tests.utils.fixtures_models import build_chain_tokenizer
from vllm.config import ModelConfig, SchedulerConfig
from vllm.engine.answer import StopStrings
from vllm.engine.input_processor import InputProcessor
from vllm.engine.messages import (
    AbortRequests,
    CoreStats,
    EndBranches,
    EngineOutputs,
    RequestFailure,
)
from vllm.engine.output_processor import OutputProcessor, ProcessedOutputs
from vllm.errors import RequestError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.sequence import SequenceResult
from vllm.step import TokenLogprobs
from vllm.transformers_utils.detokenizer import TokenBytes
from vllm.types import FinishReason

TOKENIZER = build_chain_tokenizer()
TABLE = TokenBytes(TOKENIZER)
EOS = 264
INPUTS = InputProcessor(
    ModelConfig(
        model="m", tokenizer="m", max_model_len=512, hf_config={"vocab_size": 320}, max_logprobs=20
    ),
    SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=16, max_model_len=512),
    TOKENIZER,
)


class Run:
    """One request fed by hand."""

    def __init__(self, **params) -> None:
        params.setdefault("output_kind", RequestOutputKind.DELTA)
        params.setdefault("max_tokens", 100)
        self.processor = OutputProcessor(TABLE)
        self.processor.add(INPUTS.process("r", "ABC", SamplingParams(**params)))
        self.outputs = []
        self.messages = []

    def step(self, *results: SequenceResult) -> ProcessedOutputs:
        done = self.processor.process(
            EngineOutputs(results=list(results), stats=CoreStats(), time_s=1.0)
        )
        self.outputs += done.outputs
        self.messages += done.messages
        return done

    def token(self, *ids: int, branch: int = 0, **fields) -> ProcessedOutputs:
        return self.step(
            SequenceResult(request_id="r", branch=branch, token_ids=list(ids), **fields)
        )

    @property
    def text(self) -> str:
        return "".join(c.text for o in self.outputs for c in o.outputs)

    @property
    def is_open(self) -> bool:
        return "r" in self.processor


def ids_of(*pieces: str) -> list[int]:
    return [i for piece in pieces for i in TOKENIZER.encode(piece, add_special_tokens=False)]


SPELLED = [257, ord("G"), 258, ord("J"), ord("K")]  # DEF G HI J K


@pytest.mark.parametrize(
    ("stop", "include", "text", "reason"),
    [
        ("DEFGHIJ", False, "", "DEFGHIJ"),
        ("DEFGX", False, "DEFGHIJK", None),
        ("DEFGHIJ", True, "DEFGHIJ", "DEFGHIJ"),
        (["IJ", "GH"], False, "DEF", "GH"),
        (["J", "HIJ"], False, "DEFG", "HIJ"),
        ("EF", False, "D", "EF"),
    ],
)
def test_stop_strings_over_several_tokens(stop, include: bool, text: str, reason) -> None:
    """Case C20: held back until decided, each character once, deltas equal the whole."""
    streamed = Run(stop=stop, include_stop_str_in_output=include)
    whole = Run(
        stop=stop, include_stop_str_in_output=include, output_kind=RequestOutputKind.FINAL_ONLY
    )
    for run in (streamed, whole):
        for position, token in enumerate(SPELLED):
            is_last = position == len(SPELLED) - 1
            run.token(token, finish_reason=FinishReason.LENGTH if is_last else None)
        assert run.text == text
        last = run.outputs[-1].outputs[0]
        assert run.outputs[-1].finished
        assert (last.finish_reason, last.stop_reason) == ("stop" if reason else "length", reason)
        assert not run.is_open
    is_told = reason is not None
    assert (streamed.messages == [AbortRequests(request_ids=["r"])]) == is_told
    assert len(whole.outputs) == 1


def test_ids_are_not_trimmed_and_later_tokens_are_dropped() -> None:
    run = Run(stop="G", output_kind=RequestOutputKind.CUMULATIVE)
    run.token(257, ord("G"), ord("K"))
    assert run.outputs[-1].outputs[0].token_ids == [257, ord("G")]
    assert run.text == "DEF"
    assert run.token(ord("Z")).outputs == [], "an over-run of the engine side is ignored"


@pytest.mark.parametrize("seed", range(20))
def test_stop_search_equals_search_in_the_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(200))
    stops = ["".join(rng.choice("ab") for _ in range(rng.randint(3, 9))) for _ in range(3)]
    finder, shown, position = StopStrings(stops), "", 0
    match = None
    while position < len(text) and match is None:
        size = rng.randint(1, 4)
        piece, match = finder.push(text[position : position + size])
        position += size
        shown += piece
    first = min((text.find(s) for s in stops if s in text), default=None)
    assert shown + ("" if match else finder.window) == (text if first is None else text[:first])
    assert (match is None) == (first is None)


def test_end_token_leaves_no_text_unless_asked_for() -> None:
    for fields, text in (
        ({}, "A"),
        ({"skip_special_tokens": False}, "A"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "A</s>"),
    ):
        run = Run(**fields)
        run.token(65)
        run.token(EOS, finish_reason=FinishReason.STOP)
        assert run.text == text
        assert run.outputs[-1].outputs[0].stop_reason is None
        assert run.outputs[-1].outputs[0].token_ids == [EOS]


def test_stop_token_id_is_the_reason_and_hidden() -> None:
    run = Run(stop_token_ids=[66])
    run.token(65)
    run.token(66, finish_reason=FinishReason.STOP, stop_reason=66)
    assert run.text == "A"
    assert run.outputs[-1].outputs[0].stop_reason == 66


def test_an_end_forced_by_a_grammar_keeps_its_last_text() -> None:
    run = Run()
    run.token(65, finish_reason=FinishReason.STOP)
    assert run.text == "A"


def test_min_tokens_delay_stop_strings() -> None:
    run = Run(stop="A", min_tokens=3)
    for token in (65, 66, 67):
        run.token(token)
    run.token(65)
    assert run.text == "ABC"
    assert run.outputs[-1].finished


def test_half_characters_never_show() -> None:
    """Case C28: four characters, a byte a token; a cut gives the whole characters."""
    data = "中文🌶é".encode()
    for cut, text in ((12, "中文🌶é"), (8, "中文")):
        for kind in RequestOutputKind:
            run = Run(output_kind=kind, logprobs=0)
            for position in range(cut):
                run.token(
                    data[position],
                    logprobs=[TokenLogprobs(token_ids=[data[position]], logprobs=[-0.5], rank=1)],
                    finish_reason=FinishReason.LENGTH if position == cut - 1 else None,
                )
            assert (
                run.text if kind is RequestOutputKind.DELTA else run.outputs[-1].outputs[0].text
            ) == text
            assert all("\ufffd" not in c.text for o in run.outputs for c in o.outputs)
    names = [
        next(iter(entry.values())).decoded_token
        for o in run.outputs
        for entry in o.outputs[0].logprobs
    ]
    assert "".join(names) == "中文"


def test_deltas_tell_the_prompt_once() -> None:
    run = Run()
    run.token(65)
    run.token(66)
    first, second = run.outputs
    assert (first.prompt, first.prompt_token_ids) == ("ABC", [65, 66, 67])
    assert (second.prompt, second.prompt_token_ids) == (None, None)
    assert second.outputs[0].token_ids == [66]


def test_several_answers_end_one_by_one() -> None:
    run = Run(n=2, stop="Z", temperature=1.0)
    run.step(*(SequenceResult(request_id="r", branch=b, token_ids=[65 + b]) for b in (0, 1)))
    assert [c.text for c in run.outputs[0].outputs] == ["A", "B"]
    run.token(ord("Z"), branch=1)
    assert run.messages == [EndBranches(branches=[("r", 1)])]
    assert not run.outputs[-1].finished
    assert [c.index for c in run.outputs[-1].outputs] == [1], "a delta names what changed"
    run.token(EOS, branch=0, finish_reason=FinishReason.STOP)
    assert run.outputs[-1].finished
    assert len(run.messages) == 1


def test_best_of_returns_the_likeliest() -> None:
    run = Run(n=1, best_of=3, output_kind=RequestOutputKind.FINAL_ONLY)
    for branch, value in enumerate((-3.0, -1.0, -2.0)):
        run.token(
            65 + branch,
            branch=branch,
            logprobs=[TokenLogprobs(token_ids=[65 + branch], logprobs=[value], rank=1)],
            finish_reason=FinishReason.LENGTH,
        )
    (answer,) = run.outputs[-1].outputs
    assert (answer.index, answer.text) == (1, "B")
    assert answer.logprobs is None, "they were not asked for"
    assert answer.cumulative_logprob is None


def test_logprobs_hold_the_chosen_token_and_the_likeliest() -> None:
    run = Run(logprobs=2)
    run.token(
        67, logprobs=[TokenLogprobs(token_ids=[67, 65, 66], logprobs=[-5.0, -0.5, -1.5], rank=9)]
    )
    run.token(
        65, logprobs=[TokenLogprobs(token_ids=[65, 65, 66], logprobs=[-0.5, -0.5, -1.5], rank=1)]
    )
    first, second = (o.outputs[0].logprobs[0] for o in run.outputs)
    assert {i: (e.rank, e.decoded_token) for i, e in first.items()} == {
        67: (9, "C"), 65: (1, "A"), 66: (2, "B"),
    }  # fmt: skip
    assert {i: e.rank for i, e in second.items()} == {65: 1, 66: 2}
    assert run.outputs[1].outputs[0].cumulative_logprob == pytest.approx(-5.5)


def test_prompt_logprobs_arrive_in_chunks_and_once() -> None:
    run = Run(prompt_logprobs=0)
    entry = {i: TokenLogprobs(token_ids=[64 + i], logprobs=[-float(i)], rank=1) for i in (2, 3)}
    run.token(prompt_logprobs=[entry[2]], prompt_start=1)
    assert run.outputs == []
    run.token(65, prompt_logprobs=[entry[2], entry[3]], prompt_start=1)
    told = run.outputs[0].prompt_logprobs
    assert told[0] is None
    assert [(next(iter(e)), e[64 + i].logprob) for i, e in enumerate(told[1:], 2)] == [
        (66, -2),
        (67, -3),
    ]


def test_abort_gives_a_last_output() -> None:
    run = Run()
    run.token(65)
    done = run.processor.abort(["r", "unknown"])
    assert [(o.finished, o.outputs[0].finish_reason) for o in done.outputs] == [(True, "abort")]
    assert not run.is_open


def test_failures_end_one_request_with_its_reason() -> None:
    run = Run()
    failure = RequestFailure(request_id="r", message="bad grammar", param="guided_regex")
    done = run.processor.process(
        EngineOutputs(results=[], failures=[failure], stats=CoreStats(), time_s=1.0)
    )
    (failed,) = done.failures
    assert failed.request_id == "r"
    assert isinstance(failed.error, RequestError)
    assert failed.error.param == "guided_regex"
    assert failed.output.finished
    assert failed.output.outputs[0].finish_reason == "error"
    assert not run.is_open
    assert done.stats.finished[0].reason is FinishReason.ERROR


def test_an_error_of_a_row_ends_its_request() -> None:
    run = Run(n=2)
    done = run.token(finish_reason=FinishReason.ERROR, error="processor raised")
    assert "processor raised" in str(done.failures[0].error)
    assert done.messages == [AbortRequests(request_ids=["r"])]


def test_ids_are_unique() -> None:
    run = Run()
    with pytest.raises(KeyError, match="running already"):
        run.processor.add(INPUTS.process("r", "A", SamplingParams()))


def test_late_results_never_meet_a_later_request_of_the_same_name() -> None:
    processor = OutputProcessor(TABLE)
    params = SamplingParams(max_tokens=9, output_kind=RequestOutputKind.DELTA)

    def late(engine_id: str) -> ProcessedOutputs:
        result = SequenceResult(request_id=engine_id, branch=0, token_ids=[65])
        return processor.process(EngineOutputs(results=[result], stats=CoreStats(), time_s=1.0))

    processor.add(INPUTS.process("r", "A", params, engine_id="r#1"))
    assert [o.request_id for o in late("r#1").outputs] == ["r"]
    assert processor.abort(["r"]).messages == [AbortRequests(request_ids=["r#1"])]
    processor.add(INPUTS.process("r", "A", params, engine_id="r#2"))
    assert late("r#1").outputs == []
    assert late("r#2").outputs[0].outputs[0].token_ids == [65]
    assert "r" in processor


def test_no_text_where_none_is_wanted() -> None:
    run = Run(detokenize=False, logprobs=0)
    run.token(65, logprobs=[TokenLogprobs(token_ids=[65], logprobs=[0.0], rank=1)])
    assert run.text == ""
    assert run.outputs[0].outputs[0].token_ids == [65]
