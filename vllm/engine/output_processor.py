"""From the engine side's token ids to the outputs that users see.

Keeps every open request of the caller's side, gives each its share of a step's results, and says
which answers the engine side must stop because a stop string was found. One call a step, for all
requests together. Never waits, never talks to the engine side itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.engine.input_processor import ProcessedRequest
from vllm.engine.messages import AbortRequests, EndBranches, EngineOutputs, RequestFailure
from vllm.engine.open_request import OpenRequest
from vllm.engine.stats import IterationStats
from vllm.errors import RequestError, VllmError
from vllm.outputs import RequestOutput
from vllm.transformers_utils.detokenizer import TokenBytes
from vllm.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """A request that ended by an error of its own.

    Attributes:
        output: its last output, with finish reason "error".
    """

    request_id: str
    error: VllmError
    output: RequestOutput


@dataclass(slots=True, kw_only=True)
class ProcessedOutputs:
    """What one step means for the callers.

    Attributes:
        outputs: what is due, in the order of the results.
        failures: requests that ended by an error of their own.
        messages: for the engine side.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    failures: list[FailedRequest] = field(default_factory=list)
    messages: list[AbortRequests | EndBranches] = field(default_factory=list)
    stats: IterationStats = field(default_factory=IterationStats)


class OutputProcessor:
    """The open requests of one engine.

    The engine side may know a request by another id than its caller does, so that results which are
    still on their way never meet a later request of the same name.
    """

    def __init__(self, table: TokenBytes | None) -> None:
        """Take the bytes of the tokenizer's ids; None makes no text."""
        self._table = table
        self._requests: dict[str, OpenRequest] = {}  # by the engine side's id
        self._engine_ids: dict[str, str] = {}  # by the caller's

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._engine_ids

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, processed: ProcessedRequest) -> OpenRequest:
        """Open a request; KeyError if its id is open already."""
        request_id = processed.request_id
        if request_id in self._engine_ids:
            raise KeyError(
                f"request {request_id!r} is running already; give each request its own id"
            )
        request = OpenRequest(processed, self._table)
        engine_id = processed.request.request_id
        self._requests[engine_id] = request
        self._engine_ids[request_id] = engine_id
        return request

    def _take(self, engine_id: str) -> OpenRequest | None:
        """Close a request and return it."""
        request = self._requests.pop(engine_id, None)
        if request is not None:
            del self._engine_ids[request.request_id]
        return request

    def process(self, outputs: EngineOutputs) -> ProcessedOutputs:
        """Take the results of one step."""
        done = ProcessedOutputs()
        touched: dict[str, list[int]] = {}
        ended: list[tuple[str, int]] = []
        for result in outputs.results:
            request = self._requests.get(result.request_id)
            if request is None:
                continue  # aborted, or ended by a stop string, while the step ran
            if result.finish_reason is FinishReason.ERROR:
                message = result.error or "the request failed in the engine"
                self._fail(RequestFailure(request_id=result.request_id, message=message), done)
                continue
            if request.apply(result, outputs.time_s, done.stats):
                ended.append((result.request_id, result.branch))
            if result.token_ids or result.finish_reason is not None:
                touched.setdefault(result.request_id, []).append(result.branch)
        for failure in outputs.failures:
            self._fail(failure, done)
        self._collect(touched, ended, done)
        return done

    def _fail(self, failure: RequestFailure, done: ProcessedOutputs) -> None:
        request = self._take(failure.request_id)
        if request is None:
            return
        request.end(FinishReason.ERROR)
        done.stats.finished.append(request.describe_end())
        error: VllmError = VllmError(failure.message)
        if failure.is_request_fault:
            error = RequestError(failure.message, param=failure.param)
        output = request.make_output(list(range(len(request.answers))))
        assert output is not None, "a request that has ended always has a last output"
        done.failures.append(
            FailedRequest(request_id=request.request_id, error=error, output=output)
        )
        done.messages.append(AbortRequests(request_ids=[failure.request_id]))

    def _collect(
        self,
        touched: dict[str, list[int]],
        ended: list[tuple[str, int]],
        done: ProcessedOutputs,
    ) -> None:
        finished: set[str] = set()
        for engine_id, branches in touched.items():
            request = self._requests.get(engine_id)
            if request is None:
                continue  # failed in this very step
            if request.is_finished:
                finished.add(engine_id)
                self._take(engine_id)
                done.stats.finished.append(request.describe_end())
            output = request.make_output(branches)
            if output is not None:
                done.outputs.append(output)
        if not ended:
            return
        whole = list(dict.fromkeys(rid for rid, _ in ended if rid in finished))
        single = [(rid, branch) for rid, branch in ended if rid not in finished]
        if whole:
            done.messages.append(AbortRequests(request_ids=whole))
        if single:
            done.messages.append(EndBranches(branches=single))

    def abort(self, request_ids: Iterable[str]) -> ProcessedOutputs:
        """Close requests by the caller's ids; their last output has finish reason "abort".

        Unknown ids are ignored. The messages tell the engine side.
        """
        done = ProcessedOutputs()
        for request_id in request_ids:
            engine_id = self._engine_ids.get(request_id)
            request = None if engine_id is None else self._take(engine_id)
            if request is None or engine_id is None:
                continue
            done.messages.append(AbortRequests(request_ids=[engine_id]))
            running = [a.index for a in request.answers if a.finish_reason is None]
            request.end(FinishReason.ABORT)
            done.stats.finished.append(request.describe_end())
            output = request.make_output(running)
            if output is not None:
                done.outputs.append(output)
        return done
