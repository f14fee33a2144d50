"""A step is planned while the one before runs: the same tokens as without, whatever is asked."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.test_core import Ranks, add, make_config, run, tokens_of
from tests.utils.fixtures_models import chain_text, make_reach_prompt
from tests.utils.one_thread import one_thread  # noqa: F401  a fixture for the whole module
from tests.utils.overlap import allow_steps, assert_same, run_engine, serve
from tests.utils.tiny_models import TinyModels
from vllm import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.config.resolve import _resolve_scheduler
from vllm.engine.core import EngineCore
from vllm.engine.core_loop import CoreLoop, QueueInbox
from vllm.engine.messages import AbortRequests, EngineFailed, EngineOutputs, Shutdown
from vllm.errors import EngineDeadError
from vllm.sampling_params import BeamSearchParams, GuidedDecodingParams
from vllm.step import StepOutput, StepPlan

NUM_TOKENS = 30


def prefer_next(output_ids: list[int], logits: Any) -> Any:
    """A user's processor that reads the newest token."""
    if output_ids:
        logits[(output_ids[-1] + 1) % 256] += 2.0
    return logits


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS, **fields})


def drawn(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 7, "max_tokens": NUM_TOKENS, **fields})


KINDS: Mapping[str, SamplingParams] = {
    "greedy": greedy(),
    "one": greedy(max_tokens=1),
    "two": greedy(max_tokens=2),
    "to_the_limit": greedy(max_tokens=None),
    "drawn": drawn(temperature=0.8, top_p=0.9),
    "narrow": drawn(temperature=1.3, top_k=20, min_p=0.01, seed=8),
    "penalties": greedy(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    "logprobs": greedy(logprobs=3, prompt_logprobs=2),
    "three": drawn(n=3, logprobs=0),
    "best": drawn(n=1, best_of=3, seed=11),
    "form": greedy(guided_decoding=GuidedDecodingParams(regex="[a-f]{4}(x|yz){3,9}")),
    "formed_three": drawn(n=3, guided_decoding=GuidedDecodingParams(regex="[0-9]{5,20}")),
    "bad_words": greedy(bad_words=["ab", "c"]),
    "processor": greedy(logits_processors=[prefer_next]),
    "bias": greedy(logit_bias={65: 3.0, 70: 2.0}, min_tokens=4, stop_token_ids=[65]),
    "allowed": drawn(allowed_token_ids=list(range(65, 91)), seed=3),
}
BOUND = ("penalties", "form", "formed_three", "bad_words", "processor")
"""Kinds that no step overtakes."""
CONDITIONS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "tiny_cache": {"num_gpu_blocks_override": 12, "max_num_seqs": 8},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "whole_prompts": {"enable_chunked_prefill": False},
}


def add_stops(
    requests: dict[str, tuple[list[int], SamplingParams]], answers: Mapping[str, RequestOutput]
) -> None:
    """Add requests that end in the middle of what others said: by an id, and by a string."""
    prompt = requests["greedy"][0]
    said = list(answers["greedy"].outputs[0].token_ids)
    for place in (2, 3, 8):
        token = said[place]
        requests[f"stop_id_{place}"] = (prompt, greedy(stop_token_ids=[token]))
    text = answers["allowed"].outputs[0].text
    for place in (0, 5, 11):
        changed = requests["allowed"][1].clone()
        changed.stop = [text[place : place + 2]]
        requests[f"stop_text_{place}"] = (requests["allowed"][0], changed)
    changed = drawn(allowed_token_ids=[65, 66], n=3, stop=["AB"], seed=5)
    requests["stop_text_three"] = (prompt, changed)


@pytest.fixture(scope="module")
def asked(tiny_models: TinyModels) -> Any:
    """All kinds of requests, and the answers without overlap."""
    requests = {
        kind: (make_reach_prompt(5 + 5 * i, seed=i), params)
        for i, (kind, params) in enumerate(KINDS.items())
    }
    with run_engine(tiny_models.reach(), 1) as engine:
        add_stops(requests, serve(engine, requests))
        answers = serve(engine, requests)
    ends = {name: answer.outputs[0].finish_reason for name, answer in answers.items()}
    assert all(end == "stop" for name, end in ends.items() if name.startswith("stop"))
    return requests, answers


@pytest.mark.parametrize("condition", CONDITIONS)
def test_all_kinds_together(condition: str, asked: Any, tiny_models: TinyModels) -> None:
    requests, answers = asked
    with run_engine(tiny_models.reach(), 2, **CONDITIONS[condition]) as engine:
        assert_same(serve(engine, requests), answers)
        stats = engine._core.scheduler.stats()
        assert (stats.num_preemptions > 0) == (condition == "tiny_cache")
        assert_same(serve(engine, requests), answers)  # from the prefix cache
        hits = engine._core.scheduler.stats().num_prefix_hit_tokens - stats.num_prefix_hit_tokens
        assert (hits > 0) == (condition != "no_prefix_cache")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_alone(kind: str, asked: Any, tiny_models: TinyModels) -> None:
    """Without company that holds steps back."""
    requests, answers = asked
    free = ("two", "greedy")
    with run_engine(tiny_models.reach(), 2) as engine:
        found = serve(engine, {name: requests[name] for name in dict.fromkeys((kind, *free))})
    assert_same(found, answers)
    assert len(found) == len({kind, *free})


def test_ends_in_the_middle_alone(asked: Any, tiny_models: TinyModels) -> None:
    requests, answers = asked
    chosen = {name: request for name, request in requests.items() if name.startswith("stop")}
    with run_engine(tiny_models.reach(), 2) as engine:
        found = serve(engine, chosen)
    assert_same(found, answers)
    assert found.keys() == chosen.keys()


@pytest.mark.parametrize("seed", range(4))
def test_aborts_at_random_moments(seed: int, asked: Any, tiny_models: TinyModels) -> None:
    requests, answers = asked
    rng = random.Random(seed)
    names = [name for name in requests if seed % 2 or name not in BOUND]
    rng.shuffle(names)
    flags = CONDITIONS[rng.choice(["plain", "chunks", "tiny_cache"])]
    with run_engine(tiny_models.reach(), 2, **flags) as engine:
        found = serve(engine, {name: requests[name] for name in names}, aborts=rng)
        ended = {name: output for name, output in found.items() if not _is_aborted(output)}
        assert_same(ended, answers)
        assert 0 < len(ended) < len(names)


def _is_aborted(output: RequestOutput) -> bool:
    return any(answer.finish_reason == "abort" for answer in output.outputs)


def test_the_end_of_sequence_is_the_last_token(tiny_models: TinyModels) -> None:
    """FX-CHAIN spells its text and ends: every answer has an over-run."""
    model = tiny_models.chain(chain_text("abcdefghijklm"))
    ids = {letter: [ord(letter)] for letter in "aceghjl"}
    requests = {letter: (prompt, greedy()) for letter, prompt in ids.items()}
    requests["stop"] = ([ord("a")], greedy(stop=["fg"]))
    requests["kept"] = ([ord("a")], greedy(stop=["gh"], include_stop_str_in_output=True))
    with run_engine(model, 2) as engine:
        found = serve(engine, requests)
        steps = engine._core.num_steps
    for letter in ids:
        (answer,) = found[letter].outputs
        assert answer.text == "abcdefghijklm"[ord(letter) - ord("a") + 1 :]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    (answer,) = found["stop"].outputs
    assert (answer.text, answer.stop_reason) == ("bcde", "fg")
    assert found["kept"].outputs[0].text == "bcdefgh"
    with run_engine(model, 1) as engine:
        assert_same(serve(engine, requests), found)
        assert steps <= engine._core.num_steps + 3, "one over-run at the end, hardly more"


def test_nothing_runs_any_more_when_the_last_answer_is_given(tiny_models: TinyModels) -> None:
    """A caller who stops to step has blocks and checkpoints where the next prompt finds them."""
    with run_engine(tiny_models.chain(chain_text("abcdef")), 2) as engine:
        engine.add_request("r", {"prompt_token_ids": [ord("a")]}, greedy())
        while not any(output.finished for output in engine.step()):
            assert engine.has_unfinished_requests()
        assert not engine.has_unfinished_requests()


def test_beam_search(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    beams = []
    for steps in (1, 2):

        def make(cls: type, args: EngineArgs, steps: int = steps, **kwargs: Any) -> LLMEngine:
            return LLMEngine(allow_steps(args.create_engine_config(), steps))

        monkeypatch.setattr(LLMEngine, "from_engine_args", classmethod(make))
        llm = LLM(str(tiny_models.reach()), dtype="float32", num_gpu_blocks_override=64)
        prompts = [make_reach_prompt(n, seed=n) for n in (9, 40)]
        outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=6))
        beams.append([[s.tokens for s in output.sequences] for output in outputs])
        llm.llm_engine.shutdown()
    assert beams[0] == beams[1]


class LateTicket:
    """A step that goes wrong on its way."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepOutput:
        raise self._error


class FailingRanks(Ranks):
    """The third step fails, which is known only when it is waited for."""

    def submit(self, plan: StepPlan) -> Any:
        ticket = super().submit(plan)
        return LateTicket(EngineDeadError("rank 0 fell")) if len(self.plans) == 3 else ticket


def make_core(ranks: Ranks) -> EngineCore:
    return EngineCore(allow_steps(make_config(), 2), ranks)


def test_a_step_that_fails_late_ends_the_engine() -> None:
    core = make_core(FailingRanks())
    core.handle(add("r", max_tokens=9))
    with pytest.raises(EngineDeadError, match="rank 0 fell"):
        run(core)
    reports: list[Any] = []
    ranks = FailingRanks()
    core, inbox = make_core(ranks), QueueInbox()
    inbox.put(add("r", max_tokens=9))
    CoreLoop(core, inbox, reports.append).run()
    assert isinstance(reports[-1], EngineFailed)
    assert reports[-1].kind == "EngineDeadError"
    assert ranks.is_shut_down


def test_what_is_under_way_is_work() -> None:
    ranks = Ranks()
    core = make_core(ranks)
    core.handle(add("r", max_tokens=9))
    assert core.step() == []
    assert core.num_steps_in_flight == 1
    assert core.step()[0].token_ids == [65]
    core.handle(AbortRequests(request_ids=["r"]))
    assert core.has_work
    assert core.stats().num_running == 0
    assert core.stats().cache_usage > 0, "its blocks are still being written"
    assert tokens_of(run(core), "r") == []
    assert core.num_steps_in_flight == 0
    assert core.stats().cache_usage == 0
    assert core.num_steps == len(ranks.plans)


def test_the_loop_does_not_pause_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    core, inbox = make_core(Ranks()), QueueInbox()
    reports: list[Any] = []

    def send(report: Any) -> None:
        reports.append(report)
        if any(result.finish_reason for result in report.results):
            inbox.put(Shutdown())

    def fail(seconds: float) -> None:
        raise AssertionError("there is work to do")

    monkeypatch.setattr(time, "sleep", fail)
    inbox.put(add("r", max_tokens=5))
    CoreLoop(core, inbox, send).run()
    assert all(isinstance(report, EngineOutputs) for report in reports)
    assert tokens_of(reports, "r") == [65] * 5


@pytest.mark.parametrize("is_disabled", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gpus_overlap_unless_told_otherwise(device: str, *, is_disabled: bool) -> None:
    args = EngineArgs(model="m", disable_async_output_proc=is_disabled)
    scheduler = _resolve_scheduler(args, make_config().model_config, device)
    assert scheduler.max_steps_in_flight == (2 if device == "cuda" and not is_disabled else 1)


def test_planning_is_fast() -> None:
    """A full batch of 256: far below the step that it overlaps with."""
    config = allow_steps(make_config(num_gpu_blocks_override=4096), 2)
    limits = replace(config.scheduler_config, max_num_seqs=256, max_num_batched_tokens=2048)
    core = EngineCore(replace(config, scheduler_config=limits), Ranks())
    for i in range(256):
        core.handle(add(f"r{i}", max_tokens=100))
    for _ in range(20):
        core.step()
    times_ms = []
    for _ in range(50):
        started_s = time.perf_counter()
        core.step()
        times_ms.append((time.perf_counter() - started_s) * 1e3)
    # The median: all rows cross a block edge in the same step, which then takes many times longer.
    assert statistics.median(times_ms) < 10, "about 1 on a quiet machine"
