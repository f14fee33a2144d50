"""Engines whose steps overlap beside engines whose steps do not, and the same requests to both.

Used by tests of the engine and of hybrid mode. On a CPU a step has run when it is submitted; what
matters here is that its outputs are taken in one step late.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.config import EngineConfig
from vllm.executor.abstract import Executor, Ticket
from vllm.step import StepOutput, StepPlan

Requests = Mapping[str, tuple[list[int], SamplingParams]]


class WatchedExecutor:
    """Hands plans on, and sees to it that none needs what is not back yet.

    Attributes:
        num_overlapped: plans that came while another was under way.
    """

    def __init__(self, inner: Executor, max_steps_in_flight: int) -> None:
        self._inner = inner
        self._max_steps_in_flight = max_steps_in_flight
        self._bound: set[int] = set()
        self.open: deque[StepPlan] = deque()
        self.num_overlapped = 0

    def submit(self, plan: StepPlan) -> Ticket:
        """Check a plan against those under way and start it."""
        for new in plan.new_rows:
            if new.sampling.reads_outputs or new.logits_processors:
                self._bound.add(new.seq_id)
        rows = {row.seq_id for row in plan.rows}
        for other in self.open:
            late = {row.seq_id for row in other.rows if row.num_samples} & rows
            assert not late & self._bound, "a rule would not see the last token"
            assert not late & plan.token_masks.keys(), "a mask was made without the last token"
        self.num_overlapped += bool(self.open)
        self.open.append(plan)
        assert len(self.open) <= self._max_steps_in_flight
        return _WatchedTicket(self, self._inner.submit(plan))

    def check_health(self) -> None:
        """See `Executor.check_health`."""
        self._inner.check_health()

    def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        self._inner.shutdown()


class _WatchedTicket:
    def __init__(self, executor: WatchedExecutor, inner: Ticket) -> None:
        self._executor = executor
        self._inner = inner

    def wait(self) -> StepOutput:
        output = self._inner.wait()
        assert self._executor.open.popleft().step == output.step
        return output


def allow_steps(config: EngineConfig, max_steps_in_flight: int) -> EngineConfig:
    """Return the config with so many steps under way at once."""
    scheduler = replace(config.scheduler_config, max_steps_in_flight=max_steps_in_flight)
    return replace(config, scheduler_config=scheduler)


@contextmanager
def run_engine(model: Path, max_steps_in_flight: int, **flags: Any) -> Iterator[LLMEngine]:
    """Start an engine with a poisoned cache; when the block ends, nothing may be held."""
    options = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 16, **flags}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_POISON_CACHE", "1")
        config = EngineArgs(model=str(model), **options).create_engine_config()
        engine = LLMEngine(allow_steps(config, max_steps_in_flight))
    core = engine._core
    core._executor = watched = WatchedExecutor(core._executor, max_steps_in_flight)
    try:
        yield engine
        assert not engine.has_unfinished_requests()
        assert not watched.open
        assert watched.num_overlapped > 0 or max_steps_in_flight == 1
        assert core.stats().cache_usage == 0
        cache = core.scheduler._cache
        cache.reset_prefix_cache()
        assert cache.arena.num_free_superblocks == cache.arena.num_superblocks
        assert not core._structured
    finally:
        engine.shutdown()


def serve(
    engine: LLMEngine, requests: Requests, *, aborts: random.Random | None = None
) -> dict[str, RequestOutput]:
    """Add a request every second step and answer all; `aborts` ends some at random moments."""
    waiting = deque(requests.items())
    running: set[str] = set()
    finished: dict[str, RequestOutput] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        if waiting and step % 2 == 0:
            request_id, (prompt, params) = waiting.popleft()
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
            running.add(request_id)
        if aborts is not None and running and aborts.random() < 0.05:
            victim = aborts.choice(sorted(running))
            engine.abort_request(victim)
            running.discard(victim)
        for output in engine.step():
            if output.finished:
                assert engine.take_failure(output.request_id) is None
                running.discard(output.request_id)
                finished[output.request_id] = output
        step += 1
    return finished


def assert_same(found: Mapping[str, RequestOutput], wanted: Mapping[str, RequestOutput]) -> None:
    """Every answer in `found` has the tokens, text, end and log-probabilities of `wanted`."""
    for request_id, output in found.items():
        other = wanted[request_id]
        assert len(output.outputs) == len(other.outputs)
        for a, b in zip(output.outputs, other.outputs, strict=True):
            assert list(a.token_ids) == list(b.token_ids), request_id
            assert (a.text, a.finish_reason, a.stop_reason) == (
                b.text,
                b.finish_reason,
                b.stop_reason,
            ), request_id
            assert (a.logprobs is None) == (b.logprobs is None)
            for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
                assert _values(x) == pytest.approx(_values(y), abs=1e-3)
        for x, y in zip(output.prompt_logprobs or (), other.prompt_logprobs or (), strict=True):
            assert _values(x) == pytest.approx(_values(y), abs=1e-3)


def _values(position: Any) -> dict[int, float]:
    return {token: entry.logprob for token, entry in (position or {}).items()}
