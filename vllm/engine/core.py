"""The heart: one step of one engine, without text, sockets or threads.

Owns the executor, the scheduler and the grammars of the running requests. Driven by `LLMEngine` in
the caller's thread, by `engine/core_loop.py` in a thread or a process of its own. No torch here;
the executor hides where tensors live.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from vllm.cache_spec import CacheLayout
from vllm.config import EngineConfig
from vllm.core.cache_manager import CacheManager
from vllm.core.capacity import CapacityReport, make_layout
from vllm.core.scheduler import Scheduler
from vllm.engine.messages import (
    AbortRequests,
    AddRequest,
    CacheGroup,
    ControlMessage,
    CoreStats,
    EndBranches,
    EngineOutputs,
    EngineReady,
    GroupUsage,
    LayerKernelReport,
    RequestFailure,
    SetTokenizer,
    Shutdown,
)
from vllm.engine.stats import count_free_blocks
from vllm.engine.structured_output import StructuredOutput
from vllm.errors import ConfigError, RequestError
from vllm.executor import make_executor
from vllm.executor.abstract import Executor, RankReport, Ticket
from vllm.hybrid.grouping import group_layers
from vllm.hybrid.reach import find_group_reaches
from vllm.hybrid.report import AllocationTrace, log_start
from vllm.logger import init_logger
from vllm.sequence import SequenceResult
from vllm.step import StepPlan

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = init_logger(__name__)

_GIB = 2**30


class EngineCore:
    """An engine that speaks token ids.

    Attributes:
        ready: what it is and what it holds, known once it is made.
        num_steps: steps that have returned so far.
    """

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        """Lay out the cache over the ranks of `executor`.

        Raises: ConfigError if one request of max_model_len does not fit.
        """
        self._config = config
        self._executor = executor
        reports = executor.reports()
        block_size = config.cache_config.block_size
        groups = [
            group_layers(r.cache_specs, config.hybrid, block_size, r.block_tokens) for r in reports
        ]
        log_start(config.hybrid, groups[0], block_size)
        self._trace = AllocationTrace(config.hybrid.trace_level, groups[0])
        _check_block_size(config.cache_config.block_size, reports)
        layout, capacity = make_layout(
            groups,
            [r.cache_bytes for r in reports],
            max_model_len=config.model_config.max_model_len,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            num_blocks=config.cache_config.num_gpu_blocks_override,
        )
        executor.initialize_cache(layout)
        cache = CacheManager(
            groups[0],
            layout,
            enable_prefix_caching=config.cache_config.enable_prefix_caching,
            group_reaches=find_group_reaches(reports[0].cache_specs, groups[0]),
        )
        self.scheduler = Scheduler(config.scheduler_config, cache)
        self._structured = StructuredOutput(config.model_config.vocab_size)
        self._compiling: dict[str, tuple[AddRequest, Future[LLMatcher]]] = {}
        self._failures: list[RequestFailure] = []
        self._tickets: deque[tuple[StepPlan, Ticket]] = deque()
        self.num_steps = 0
        self._last_step_ms = 0.0
        self.ready = _make_ready(reports, layout, capacity, self.stats().groups)
        _log_capacity(self.ready, capacity)

    @property
    def has_work(self) -> bool:
        """Whether a step waits or runs, or a form is being compiled."""
        return bool(self.scheduler.has_unfinished or self._compiling or self._failures)

    @property
    def num_steps_in_flight(self) -> int:
        """Steps that were started and have not been taken in."""
        return len(self._tickets)

    def add_now(self, message: AddRequest) -> None:
        """Accept a request; compiles its form first.

        Raises: RequestError if it can never be served, or its form is wrong.
        """
        matcher = None
        if message.grammar is not None:
            matcher = self._structured.start_compile(message.grammar).result()
        self._admit(message, matcher)

    def handle(self, message: ControlMessage) -> None:
        """Do what a message asks; a refused request becomes a failure of the next outputs."""
        if isinstance(message, AddRequest):
            self._add_later(message)
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self.abort(request_id)
        elif isinstance(message, EndBranches):
            for request_id, branch in message.branches:
                self._structured.end_branch(request_id, branch)
                self.scheduler.abort_branch(request_id, branch)
        elif isinstance(message, SetTokenizer):
            self._structured.set_tokenizer(message)
        else:
            assert isinstance(message, Shutdown), f"unknown message {message!r}"

    def abort(self, request_id: str) -> None:
        """End a request without results; unknown ids are ignored."""
        waiting = self._compiling.pop(request_id, None)
        if waiting is not None:
            waiting[1].cancel()
        self._structured.remove(request_id)
        self.scheduler.abort(request_id)

    def step(self) -> list[SequenceResult]:
        """Plan a step, start it, and return what the oldest one means for each answer.

        A step that may be overlapped by the next is not waited for: there are no results then.

        Raises: EngineDeadError if a rank failed; nothing can be run after that.
        """
        started_s = time.perf_counter()
        self._admit_compiled()
        plan = self.scheduler.schedule()
        if not plan.is_empty:
            self._fill_masks(plan)
            self._trace.log(plan)
            self._tickets.append((plan, self._executor.submit(plan)))
        if self._tickets and (plan.is_empty or self._is_full):
            plan, ticket = self._tickets.popleft()
            results = self.scheduler.update(plan, ticket.wait())
            self.num_steps += 1
            self._last_step_ms = 1000 * (time.perf_counter() - started_s)
        else:
            results = self.scheduler.take_results()
        if self._structured:
            self._structured.accept(results)
        return results

    @property
    def _is_full(self) -> bool:
        """Whether a step must return before the next can be planned."""
        return len(self._tickets) >= self._config.scheduler_config.max_steps_in_flight

    def make_outputs(self, results: list[SequenceResult]) -> EngineOutputs:
        """Wrap the results of a step with the failures since the last and the counts of now."""
        failures, self._failures = self._failures, []
        if failures:
            failed = {f.request_id for f in failures}
            results = [r for r in results if r.request_id not in failed]
        return EngineOutputs(
            results=results, failures=failures, stats=self.stats(), time_s=time.time()
        )

    def stats(self) -> CoreStats:
        """Return counts of now."""
        stats = self.scheduler.stats()
        return CoreStats(
            num_running=stats.num_running_requests,
            num_waiting=stats.num_waiting_requests + len(self._compiling),
            groups=[
                GroupUsage(
                    name=group.name,
                    num_total_blocks=(group.num_superblocks + stats.num_free_superblocks)
                    * group.blocks_per_superblock,
                    num_used_blocks=group.num_held_blocks,
                    num_cached_blocks=group.num_cached_blocks,
                    num_own_blocks=group.num_superblocks * group.blocks_per_superblock,
                )
                for group in stats.groups
            ],
            cache_usage=stats.cache_usage,
            num_free_superblocks=stats.num_free_superblocks,
            num_steps=self.num_steps,
            num_preemptions=stats.num_preemptions,
            num_cache_queries=stats.num_prefix_query_tokens,
            num_cache_hits=stats.num_prefix_hit_tokens,
            last_step_ms=self._last_step_ms,
        )

    def check_health(self) -> None:
        """Raise EngineDeadError if a rank has ended."""
        self._executor.check_health()

    def shutdown(self) -> None:
        """Free everything; safe to call twice."""
        self._structured.shutdown()
        self._executor.shutdown()

    def _add_later(self, message: AddRequest) -> None:
        request_id = message.request.request_id
        if message.grammar is not None:
            future = self._structured.start_compile(message.grammar)
            self._compiling[request_id] = (message, future)
            return
        try:
            self._admit(message, None)
        except RequestError as error:
            self._fail(_describe(request_id, error))

    def _admit(self, message: AddRequest, matcher: LLMatcher | None) -> None:
        self.scheduler.add(message.request)
        if matcher is not None:
            self._structured.add(message.request.request_id, matcher, message.request.n)

    def _admit_compiled(self) -> None:
        """Hand requests whose form is compiled to the scheduler, in the order they came."""
        for request_id, (message, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            try:
                self._admit(message, future.result())
            except RequestError as error:
                self._fail(_describe(request_id, error))

    def _fill_masks(self, plan: StepPlan) -> None:
        """Give the rows under a form the ids that may come next.

        A request whose form cannot be followed any more fails; its row is an over-run.
        """
        if not self._structured:
            return
        for seq_id, request_id, branch in self.scheduler.sampled_rows():
            if request_id not in self._structured:
                continue
            try:
                plan.token_masks[seq_id] = self._structured.next_mask(request_id, branch)
            except RequestError as error:
                self._fail(_describe(request_id, error))

    def _fail(self, failure: RequestFailure) -> None:
        self.abort(failure.request_id)
        self._failures.append(failure)


def make_core(config: EngineConfig) -> EngineCore:
    """Start the ranks that `config` asks for and make the core above them.

    Raises: VllmError saying what cannot be loaded or does not fit; no rank is left behind then.
    """
    executor = make_executor(config)
    try:
        return EngineCore(config, executor)
    except BaseException:
        executor.shutdown()
        raise


def _describe(request_id: str, error: RequestError) -> RequestFailure:
    return RequestFailure(request_id=request_id, message=str(error), param=error.param)


def _check_block_size(block_size: int, reports: tuple[RankReport, ...]) -> None:
    for report in reports:
        if block_size not in report.block_tokens:
            raise ConfigError(
                f"block_size {block_size} is not served by the kernels of rank {report.rank}; "
                f"allowed: {', '.join(map(str, report.block_tokens))}"
            )


def _make_ready(
    reports: tuple[RankReport, ...],
    layout: CacheLayout,
    capacity: CapacityReport,
    groups: list[GroupUsage],
) -> EngineReady:
    first = layout.groups[0]
    cache_groups = [
        CacheGroup(
            name=g.name,
            layers=list(g.layers),
            block_tokens=g.block_tokens,
            block_bytes=g.block_bytes,
            blocks_per_superblock=g.blocks_per_superblock,
            blocks_per_sequence=g.blocks_per_sequence,
            waste=g.waste,
        )
        for g in capacity.groups
    ]
    is_uniform = len(layout.groups) == 1
    num_tokens = layout.num_superblocks * first.blocks_per_superblock * first.block_tokens
    return EngineReady(
        kernels=[
            LayerKernelReport(layer=k.layer, kernel=k.kernel, note=k.note)
            for k in reports[0].kernels
        ],
        groups=groups,
        num_cache_tokens=num_tokens if is_uniform else capacity.tokens_at_max_len,
        num_gpu_blocks=count_free_blocks(cache_groups, layout.num_superblocks),
        block_tokens=first.block_tokens,
        cache_bytes=capacity.arena_bytes,
        weight_bytes=sum(r.weight_bytes for r in reports),
        load_seconds=max(r.load_seconds for r in reports),
        cache_groups=cache_groups,
        num_free_superblocks=layout.num_superblocks,
        startup={
            "max_model_len": capacity.max_model_len,
            "max_concurrency": round(capacity.max_concurrency, 2),
            "tokens_at_max_model_len": capacity.tokens_at_max_len,
            "bytes_per_sequence": capacity.bytes_per_sequence,
            "superblock_bytes": capacity.superblock_bytes,
            "num_superblocks": capacity.num_superblocks,
            "num_ranks": len(reports),
        },
    )


def _log_capacity(ready: EngineReady, capacity: CapacityReport) -> None:
    logger.info(
        "# GPU blocks: %d of %s tokens (%.2f GiB), # CPU blocks: 0",
        ready.num_gpu_blocks,
        " and ".join(dict.fromkeys(str(group.block_tokens) for group in ready.cache_groups)),
        ready.cache_bytes / _GIB,
    )
    logger.info(
        "Maximum concurrency for %d tokens per request: %.2fx",
        capacity.max_model_len,
        capacity.max_concurrency,
    )
