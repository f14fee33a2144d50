"""Who waits, who runs and who ends: the sequences of the scheduler and their transitions.

Called by `core/scheduler.py` only. Every change of a sequence's status happens here, together with
what it means for blocks, seats and the workers' rows. It decides nothing about order or budget.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

import msgspec

from vllm.core.cache_manager import CacheManager
from vllm.core.policy import Policy, WaitingQueue
from vllm.errors import RequestError
from vllm.sequence import RequestState, Sequence, SequenceRequest, SequenceResult, SequenceStatus
from vllm.types import FinishReason

_by_rank = attrgetter("rank")


class Roster:
    """All sequences that have not ended.

    Attributes:
        running: sequences with a seat, best rank first.
        prefilling: those of them that have known tokens left to compute beside the newest.
        waiting: sequences without a seat.
        num_reserved_seats: seats kept for branches of running requests that have not forked.
        num_releasing: sequences that left while a step with them runs; their blocks come back with
            that step.
        num_preemptions: preemptions so far.
    """

    def __init__(self, cache: CacheManager, policy: Policy, max_model_len: int) -> None:
        self._cache = cache
        self._policy = policy
        self._max_model_len = max_model_len
        self._requests: dict[str, RequestState] = {}
        self._num_requests_added = 0
        self._num_sequences_added = 0
        self._dropped: list[int] = []
        self._results: list[SequenceResult] = []
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.prefilling: dict[int, Sequence] = {}
        self.num_reserved_seats = 0
        self.num_releasing = 0
        self.num_preemptions = 0

    @property
    def requests(self) -> dict[str, RequestState]:
        """Requests that have not ended, by id."""
        return self._requests

    @property
    def num_seats(self) -> int:
        """Seats taken or reserved."""
        return len(self.running) + self.num_reserved_seats

    def add(self, request: SequenceRequest) -> None:
        """Enter a request as one waiting sequence; RequestError if its id is in use."""
        if request.request_id in self._requests:
            raise RequestError(
                f"request id '{request.request_id}' is already in use; ids must be unique among "
                "unfinished requests",
                param="request_id",
            )
        state = RequestState(request, self._num_requests_added)
        self._num_requests_added += 1
        self._requests[request.request_id] = state
        self.waiting.push(self._make_sequence(state, 0, list(request.prompt_token_ids)))

    def start(self, sequence: Sequence) -> None:
        """Give a sequence a seat."""
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        self.num_reserved_seats += sequence.state.num_seats - 1
        insort(self.running, sequence, key=_by_rank)

    def preempt(self, sequence: Sequence) -> None:
        """Take the seat and the blocks of a running sequence; it will be recomputed."""
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self._leave(sequence)
        if sequence.num_in_flight:
            sequence.status = SequenceStatus.DRAINING
            self.num_releasing += 1
        else:
            self._requeue(sequence)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        result: SequenceResult | None = None,
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> None:
        """End a sequence.

        Without a `result` to complete, a new one is kept for `take_results`.
        """
        if result is None:
            result = SequenceResult(sequence.state.request.request_id, sequence.branch, [])
            self._results.append(result)
        result.finish_reason = reason
        result.stop_reason = stop_reason
        result.error = error
        self._end(sequence)

    def abort(self, request_id: str) -> bool:
        """End every sequence of a request without a result; False if the id is unknown."""
        state = self._requests.get(request_id)
        if state is None:
            return False
        for sequence in list(state.sequences):
            self._end(sequence)
        return True

    def abort_branch(self, request_id: str, branch: int) -> bool:
        """End one branch of a request without a result; False if it is unknown or has not begun."""
        state = self._requests.get(request_id)
        if state is None or not state.is_forked:
            return False
        for sequence in state.sequences:
            if sequence.branch == branch:
                self._end(sequence)
                return True
        return False

    def note_return(self, sequence: Sequence) -> None:
        """A step with a sequence that left has returned; free its blocks if it was the last."""
        if sequence.num_in_flight:
            return
        self.num_releasing -= 1
        if sequence.status is SequenceStatus.DRAINING:
            self._requeue(sequence)
        else:
            self._free(sequence)

    def add_branches(self, parent: Sequence, token_ids: list[int]) -> list[Sequence]:
        """Make the branches 1 … n-1 of a request whose prompt is complete.

        They share the parent's blocks and take the seats reserved for them; where blocks cannot be
        shared, or the parent has lost its seat, they wait and are recomputed.

        Args:
            parent: branch 0.
            token_ids: first output token of each of the n branches.
        """
        state = parent.state
        is_seated = parent.status is SequenceStatus.RUNNING
        if is_seated:
            self.num_reserved_seats -= state.num_seats - 1
        state.is_forked = True
        prompt = parent.token_ids[: parent.num_prompt_tokens]
        branches = []
        for branch in range(1, state.request.n):
            child = self._make_sequence(state, branch, [*prompt, token_ids[branch]])
            shared = self._cache.fork(parent.cache, parent.num_prompt_tokens) if is_seated else None
            if shared is None:
                self.waiting.push(child)
            else:
                child.cache = shared
                child.num_computed_tokens = parent.num_prompt_tokens
                self.start(child)
            branches.append(child)
        return branches

    def take_dropped(self) -> list[int]:
        """Return ids of rows that the workers must let go."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_results(self) -> list[SequenceResult]:
        """Return results that no step brought."""
        results, self._results = self._results, []
        return results

    @property
    def has_results(self) -> bool:
        """Whether `take_results` would return any."""
        return bool(self._results)

    def _make_sequence(self, state: RequestState, branch: int, token_ids: list[int]) -> Sequence:
        request = state.request
        sampling = request.sampling
        if branch and sampling.num_prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
        num_prompt = len(request.prompt_token_ids)
        max_len = max(num_prompt + 1, self._max_model_len)
        if request.max_tokens is not None:
            max_len = min(max_len, num_prompt + request.max_tokens)
        sequence = Sequence(
            seq_id=self._num_sequences_added,
            state=state,
            branch=branch,
            token_ids=token_ids,
            max_len=max_len,
            rank=self._policy.rank(request, state.order, branch),
            sampling=sampling,
        )
        self._num_sequences_added += 1
        state.sequences.append(sequence)
        return sequence

    def _end(self, sequence: Sequence) -> None:
        status = sequence.status
        if status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        elif status is SequenceStatus.RUNNING:
            self._leave(sequence)
        sequence.status = SequenceStatus.FINISHED
        state = sequence.state
        state.sequences.remove(sequence)
        if not state.sequences:
            del self._requests[state.request.request_id]
        if status is SequenceStatus.DRAINING:
            return
        if sequence.num_in_flight:
            self.num_releasing += 1
        else:
            self._free(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence off its seat and out of the workers' rows."""
        self.running.remove(sequence)
        self.prefilling.pop(sequence.seq_id, None)
        self.num_reserved_seats -= sequence.state.num_seats - 1
        if sequence.is_resident:
            sequence.is_resident = False
            self._dropped.append(sequence.seq_id)

    def _requeue(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_pending_tokens = 0
        self.waiting.push(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._cache.free(sequence.cache, sequence.token_ids, sequence.num_computed_tokens)
