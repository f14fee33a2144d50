"""Random schedules in the engine's own order: a step is planned while the one before still runs.

Requests arrive, are aborted, and lose single branches one step after the token that caused it, as
if a stop string had been found. After every step all counts are recomputed from scratch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from tests.core.builders import Harness
from tests.core.invariants import check_scheduler
from tests.core.test_random_schedules import check_outputs, draw_request
from vllm.core.block.table import make_block_managers
from vllm.core.need import count_superblocks, peak_blocks
from vllm.errors import RequestError
from vllm.sequence import Sequence, SequenceRequest, SequenceStatus

_STOP_TOKENS = frozenset({3, 11, 29})
"""Stand in for the last tokens of stop strings, where a request has any."""

ListOthers = Callable[[Harness, list[Sequence]], Iterable[tuple[int, int]]]


class LateSchedule:
    """One random run; `run` raises where a rule is broken or a token is wrong.

    Args:
        harness: the engine to be.
        rng: draws everything.
        max_len: its max_model_len.
        list_others: (group, block) references beside those of tables.
    """

    def __init__(
        self,
        harness: Harness,
        rng: random.Random,
        max_len: int,
        list_others: ListOthers = lambda harness, sequences: (),
    ) -> None:
        self._harness = harness
        self._rng = rng
        self._max_len = max_len
        self._list_others = list_others
        self._alive: dict[str, SequenceRequest] = {}
        self._stopped: set[str] = set()
        self._watched: dict[int, Sequence] = {}
        self._late: list[tuple[str, int]] = []
        self._num_requests = 0
        needs = peak_blocks(make_block_managers(harness.groups), max_len, max_len)
        least = count_superblocks(needs, harness.cache.arena.blocks_per_superblock)
        self._is_proven = least <= harness.layout.num_superblocks

    def run(self, num_steps: int) -> None:
        """Take random steps, then drain, and check every answer."""
        harness, rng = self._harness, self._rng
        for _ in range(num_steps):
            if len(harness.scheduler._roster.requests) < 2 * harness.config.max_num_seqs:
                for _ in range(rng.choice([0, 0, 0, 1, 2])):
                    self._add()
            if rng.random() < 0.05:
                self._abort()
            if rng.random() < 0.01:
                harness.cache.reset_prefix_cache()
            self._step()
        while harness.scheduler.has_unfinished:
            self._step()
        check_scheduler(harness, [])
        for request in self._alive.values():
            if request.request_id not in self._stopped:
                check_outputs(harness, request, proven=self._is_proven)
        harness.assert_drained()

    def _step(self) -> None:
        """What `EngineCore.step` does, then what the text side makes of the results."""
        harness = self._harness
        plan = harness.submit()
        self._check_bound_rows()
        results = []
        if harness.num_tickets and (plan.is_empty or harness.num_tickets == 2):
            results = harness.collect()
        for request_id, branch in self._late:
            harness.scheduler.abort_branch(request_id, branch)
        self._late.clear()
        for result in results:
            request = self._alive.get(result.request_id)
            if request is not None and request.priority and _STOP_TOKENS & {*result.token_ids}:
                self._late.append((result.request_id, result.branch))
                self._stopped.add(result.request_id)
        self._check()

    def _check_bound_rows(self) -> None:
        """No row runs beside a step that brings a token which the host must see first."""
        in_flight = list(self._harness.scheduler._in_flight)
        if len(in_flight) < 2:
            return
        (first, sequences), (second, _) = in_flight
        rows = {row.seq_id for row in second.rows}
        for row, sequence in zip(first.rows, sequences, strict=True):
            bound = sequence.state.request.needs_host_token and row.num_samples
            assert not (bound and row.seq_id in rows)

    def _add(self) -> None:
        request = draw_request(self._rng, self._num_requests, self._max_len)
        self._num_requests += 1
        try:
            self._harness.scheduler.add(request)
        except RequestError:
            return
        self._alive[request.request_id] = request

    def _abort(self) -> None:
        states = self._harness.scheduler._roster.requests
        if states:
            name = self._rng.choice(list(states))
            self._watched.update((s.seq_id, s) for s in states[name].sequences)
            self._harness.scheduler.abort(name)
            self._alive.pop(name, None)

    def _check(self) -> None:
        states = self._harness.scheduler._roster.requests.values()
        alive = [s for state in states for s in state.sequences]
        self._watched.update((s.seq_id, s) for s in alive)
        ended = [s for s in self._watched.values() if s.status is SequenceStatus.FINISHED]
        for sequence in ended:
            if not sequence.num_in_flight:
                del self._watched[sequence.seq_id]
        ended = [s for s in ended if s.num_in_flight]
        check_scheduler(self._harness, ended, self._list_others(self._harness, [*alive, *ended]))
