"""Small caches, schedulers and a loop around them for the tests of core."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.utils.fake_executor import FakeExecutor, generate
from vllm.cache_spec import (
    CacheField,
    CacheLayout,
    Full,
    GroupLayout,
    KVCacheGroup,
    LayerCacheSpec,
    make_group,
)
from vllm.config import SchedulerConfig
from vllm.core.cache_manager import CacheManager
from vllm.core.scheduler import Scheduler
from vllm.sequence import SequenceRequest, SequenceResult
from vllm.step import RowSampling, StepPlan
from vllm.types import DType, FinishReason


def full_specs(layers: Sequence[int] = (0,), heads: int = 1) -> list[LayerCacheSpec]:
    """Full layers with tiny rows."""
    k = CacheField(name="k", shape=(heads, 16), dtype=DType.FLOAT32)
    v = CacheField(name="v", shape=(heads, 16), dtype=DType.FLOAT32)
    return [LayerCacheSpec(layer=layer, fields=(k, v), lifetime=Full()) for layer in layers]


def full_group(
    name: str = "full", *, block_tokens: int = 4, layers: Sequence[int] = (0,), heads: int = 1
) -> KVCacheGroup:
    """A group of Full layers."""
    return make_group(name, full_specs(layers, heads), block_tokens)


def layout_of(
    groups: Sequence[KVCacheGroup],
    num_superblocks: int,
    per_superblock: Sequence[int] | None = None,
) -> CacheLayout:
    """A layout with given K_g (1 each by default)."""
    return CacheLayout(
        groups=tuple(
            GroupLayout(
                name=group.name,
                layers=group.layers,
                block_tokens=group.block_tokens,
                blocks_per_superblock=per,
            )
            for group, per in zip(groups, per_superblock or [1] * len(groups), strict=True)
        ),
        num_superblocks=num_superblocks,
    )


@dataclass
class Harness:
    """A scheduler with a fake executor, and everything that came out."""

    groups: Sequence[KVCacheGroup]
    layout: CacheLayout
    config: SchedulerConfig
    caching: bool = True
    grain_tokens: int = 8
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    stop_reasons: dict[tuple[str, int], int | None] = field(default_factory=dict)
    results: list[SequenceResult] = field(default_factory=list)
    on_step: Callable[[], None] = lambda: None
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = CacheManager(
            self.groups,
            self.layout,
            enable_prefix_caching=self.caching,
            grain_tokens=self.grain_tokens,
        )
        self.scheduler = Scheduler(self.config, self.cache, clock=lambda: 0.0)
        self.executor = FakeExecutor(
            self.groups,
            self.layout,
            max_rows=self.config.max_num_seqs,
            max_tokens=self.config.max_num_batched_tokens,
        )
        self._tickets: deque = deque()

    def submit(self) -> StepPlan:
        """Plan a step and run it; its output waits for `collect`."""
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        if plan.is_empty:
            self._record(self.scheduler.take_results())
        else:
            self._tickets.append((plan, self.executor.run(plan)))
        return plan

    def collect(self) -> list[SequenceResult]:
        """Take in the output of the oldest step."""
        plan, output = self._tickets.popleft()
        results = self.scheduler.update(plan, output)
        self._record(results)
        return results

    @property
    def num_tickets(self) -> int:
        """Steps on their way."""
        return len(self._tickets)

    def step(self) -> list[SequenceResult]:
        """One step without overlap."""
        before = len(self.results)
        plan = self.submit()
        if not plan.is_empty:
            self.collect()
        return self.results[before:]

    def run(self, max_steps: int = 10_000, *, overlap: bool = False) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            while len(self._tickets) > int(overlap):
                self.collect()
            if not self.scheduler.has_unfinished:
                break
            self.on_step()
            if self.submit().is_empty and self._tickets:
                self.collect()
        else:
            raise AssertionError("the scheduler does not come to an end")
        while self._tickets:
            self.collect()

    def _record(self, results: Sequence[SequenceResult]) -> None:
        for result in results:
            key = (result.request_id, result.branch)
            assert key not in self.ends, "a result after the end"
            self.tokens[key].extend(result.token_ids)
            if result.finish_reason is not None:
                self.ends[key] = result.finish_reason
                self.stop_reasons[key] = result.stop_reason
        self.results.extend(results)

    def assert_drained(self) -> None:
        """Nothing is held, and without the cached prefixes the arena is as it was at first."""
        arena = self.cache.arena
        assert not self.scheduler.has_unfinished
        assert self.cache.usage == 0
        assert all(arena.num_held_blocks(g) == 0 for g in range(len(self.groups)))
        self.cache.reset_prefix_cache()
        assert arena.num_free_superblocks == arena.num_superblocks
        assert arena.num_idle == 0
        assert not any(arena.num_free_slots)
        assert not any(arena.num_reclaimable)


def scheduler_config(**changes: object) -> SchedulerConfig:
    """A small configuration; harnesses choose whether they overlap."""
    values: dict = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "max_model_len": 128,
        "max_steps_in_flight": 2,
    }
    values.update(changes)
    return SchedulerConfig(**values)


def full_harness(
    num_blocks: int = 64, *, block_tokens: int = 4, caching: bool = True, **changes: object
) -> Harness:
    """A harness over one Full group."""
    groups = [full_group(block_tokens=block_tokens)]
    return Harness(groups, layout_of(groups, num_blocks), scheduler_config(**changes), caching)


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int | None = 8,
    seed: int = 0,
    min_tokens: int = 0,
    prompt_logprobs: int | None = None,
    eos: int | None = None,
    **fields: object,
) -> SequenceRequest:
    """A request; without `eos` it runs to max_tokens."""
    sampling = RowSampling(seed=seed, min_tokens=min_tokens, num_prompt_logprobs=prompt_logprobs)
    return SequenceRequest(
        request_id=request_id, prompt_token_ids=list(prompt), sampling=sampling,
        max_tokens=max_tokens, eos_token_id=eos, arrival_time=0.0, **fields,
    )  # fmt: skip


def expected_tokens(request: SequenceRequest, branch: int, max_model_len: int) -> list[int]:
    """What the request's branch must produce in any company."""
    room = max(1, max_model_len - len(request.prompt_token_ids))
    limit = room if request.max_tokens is None else min(request.max_tokens, room)
    ends = [*request.stop_token_ids]
    if request.eos_token_id is not None:
        ends.append(request.eos_token_id)
    return generate(
        request.prompt_token_ids, branch=branch, seed=request.sampling.seed, max_tokens=limit,
        ends=ends, min_tokens=request.sampling.min_tokens,
    )  # fmt: skip
