"""The asynchronous engine: every request is a stream of outputs.

The only async layer below HTTP. The engine side runs in a process of its own (the server) or in a
thread of this one; this class sees both alike. Reports arrive on the event loop, become outputs
for all requests at once, and wake the streams they belong to. In front of an engine process it
imports no torch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping

from vllm.config import EngineConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_beam_search import make_step_params, run_beam_search
from vllm.engine.client import ProcessCore
from vllm.engine.configured import ConfiguredEngine
from vllm.engine.core_client import CoreClient, ThreadCore
from vllm.engine.messages import EngineFailed, EngineOutputs, ReportMessage
from vllm.engine.metrics import StatLoggerBase
from vllm.engine.output_processor import ProcessedOutputs
from vllm.engine.request_stream import RequestStream
from vllm.engine.stats import EngineStats
from vllm.engine.text_side import TextSide
from vllm.errors import EngineDeadError
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.prompt_adapter.request import PromptAdapterRequest
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.usage.usage_lib import UsageContext

logger = init_logger(__name__)

AsyncEngineDeadError = EngineDeadError
"""The name that 0.6.3 has for it."""

_LOG_S = 5.0


class AsyncLLMEngine(ConfiguredEngine):
    """An engine for many concurrent consumers, all on one event loop.

    Attributes:
        log_requests: whether callers should log each request; the engine itself does not.
    """

    def __init__(
        self,
        engine_config: EngineConfig,
        core: CoreClient,
        *,
        log_requests: bool = True,
        stat_loggers: dict[str, StatLoggerBase] | None = None,
    ) -> None:
        """Start the engine side, load the tokenizer meanwhile, and wait until both are there.

        Args:
            engine_config: what to run.
            core: the engine side, not started yet.
            log_requests: see above.
            stat_loggers: instead of the log and Prometheus.

        Raises: VllmError saying what cannot be loaded or does not fit.
        """
        super().__init__(engine_config)
        self.log_requests = log_requests
        self._core = core
        self._streams: dict[str, RequestStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._log_timer: asyncio.TimerHandle | None = None
        self._cause: str | None = None
        self._has_failed = False
        self._is_shut_down = False
        core.start()
        try:
            self._text = TextSide(
                engine_config,
                without_torch=not core.takes_callables,
                is_remote=True,
                stat_loggers=stat_loggers,
            )
            self._text.set_ready(core.wait_ready())
        except BaseException:  # Ctrl-C as well: no process may be left behind
            core.shutdown()
            raise

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        engine_config: EngineConfig | None = None,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: dict[str, StatLoggerBase] | None = None,
        *,
        in_own_process: bool = False,
    ) -> AsyncLLMEngine:
        """Resolve the arguments and make the engine; returns once the model is loaded.

        Args:
            engine_args: what to run.
            engine_config: resolved already, if so.
            start_engine_loop: accepted; the engine side always runs.
            usage_context: accepted; nothing is reported to anyone.
            stat_loggers: instead of the log and Prometheus.
            in_own_process: run the engine side in a process of its own.
        """
        config = engine_config or engine_args.create_engine_config()
        core = ProcessCore(config) if in_own_process else ThreadCore(config)
        return cls(
            config,
            core,
            log_requests=not engine_args.disable_log_requests,
            stat_loggers=stat_loggers,
        )

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Queue a request and return the generator of its outputs.

        Closing the generator, or cancelling the task that waits for it, aborts the request.

        Raises:
            RequestError, TypeError, KeyError: this request cannot be served.
            EngineDeadError: none can.
        """
        stream = self._open(
            request_id,
            prompt,
            params,
            arrival_time=arrival_time,
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
            priority=priority,
        )
        return self._follow(stream)

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request; yields as `sampling_params.output_kind` asks.

        Args:
            prompt: text or ids.
            sampling_params: how to answer.
            request_id: unique among open requests.
            lora_request: refused.
            trace_headers: accepted; traces are not exported.
            prompt_adapter_request: refused.
            priority: smaller is served earlier, under the priority policy.

        Raises: what `add_request` raises, at the first `anext`; RequestError or EngineDeadError
            later.
        """
        stream = self._open(
            request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
            priority=priority,
        )
        try:
            async for output in stream:
                yield output
        finally:
            self._leave(stream)

    def _open(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
    ) -> RequestStream:
        self._bind()
        self._raise_cause()
        processed = self._text.process(
            request_id,
            prompt,
            params,
            priority=priority,
            arrival_time=arrival_time,
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
            takes_callables=self._core.takes_callables,
        )
        tokenizer = self._text.take_tokenizer_message(processed.message)
        if tokenizer is not None:
            self._core.send(tokenizer)
        self._text.open(processed)
        stream = self._streams[request_id] = RequestStream(request_id)
        self._core.send(processed.message)
        return stream

    async def _follow(self, stream: RequestStream) -> AsyncGenerator[RequestOutput, None]:
        try:
            async for output in stream:
                yield output
        finally:
            self._leave(stream)

    def _leave(self, stream: RequestStream) -> None:
        """The consumer goes: end its request, unless that has ended already."""
        request_id = stream.request_id
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._deliver(self._text.abort([request_id]))

    async def abort(self, request_id: str) -> None:
        """End a request; its consumer gets a last output with finish reason "abort".

        Unknown ids are ignored. Raises: EngineDeadError if the engine has ended.
        """
        self._bind()
        self._raise_cause()
        if request_id in self._streams:
            self._deliver(self._text.abort([request_id]))
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                stream.close()

    async def beam_search(
        self, prompt: PromptType, request_id: str, params: BeamSearchParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a beam search; yields one finished output, best beam first.

        The token ids of each answer begin with the prompt's, its text does not.

        Raises: RequestError if the prompt or the width cannot be served.
        """
        model = self.engine_config.model_config
        step_params = make_step_params(params, model.max_logprobs)
        processed = self._text.process(request_id, prompt, step_params)
        yield await run_beam_search(
            self.generate,
            self._text.tokenizer,
            processed.prompt,
            processed.request.prompt_token_ids,
            request_id,
            params,
            step_params=step_params,
            max_model_len=model.max_model_len,
        )

    def _bind(self) -> None:
        """Receive reports on the running event loop."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise RuntimeError("the engine is bound to another event loop that still runs")
            self._core.detach()
            for stream in list(self._streams.values()):  # their consumers went with that loop
                self._leave(stream)
        self._loop = loop
        self._core.attach(loop, self._handle)
        self._tick()

    def _tick(self) -> None:
        """Every few seconds: let the log say that nothing happens any more."""
        if self._loop is None or self._cause is not None:
            return
        self._text.record_idle()
        self._log_timer = self._loop.call_later(_LOG_S, self._tick)

    def _handle(self, report: ReportMessage) -> None:
        if isinstance(report, EngineOutputs):
            self._deliver(self._text.apply(report))
        elif isinstance(report, EngineFailed) and self._cause is None:
            if report.trace:
                logger.error("the engine has failed\n%s", report.trace)
            self._die(f"the engine has ended: {report.message}")

    def _deliver(self, done: ProcessedOutputs) -> None:
        streams = self._streams
        for output in done.outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue
            stream.put(output)
            if output.finished:
                del streams[output.request_id]
        for failed in done.failures:
            stream = streams.pop(failed.request_id, None)
            if stream is not None:
                stream.put(failed.error)
        for message in done.messages:
            self._core.send(message)

    def _die(self, cause: str) -> None:
        """End every stream with the cause and free the engine side."""
        self._cause = cause
        self._has_failed = True
        logger.error("%s", cause)
        self._text.set_dead()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(EngineDeadError(cause))
        self._text.abort(streams)
        self._core.detach()
        threading.Thread(target=self._core.shutdown, name="engine-shutdown", daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether requests can be served now."""
        return self._cause is None

    @property
    def is_stopped(self) -> bool:
        """Whether the engine has ended, by request or by an error."""
        return self._cause is not None

    @property
    def errored(self) -> bool:
        """Whether the engine has ended by an error."""
        return self._has_failed

    @property
    def dead_error(self) -> BaseException:
        """The error that every open and later request gets."""
        return EngineDeadError(self._cause or "the engine runs")

    def _raise_cause(self) -> None:
        if self._cause is not None:
            raise EngineDeadError(self._cause)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has ended; runs no forward pass."""
        self._bind()
        self._raise_cause()

    async def stats(self) -> EngineStats:
        """Return one snapshot of requests, blocks and kernels, describing now."""
        self._bind()
        return self._text.make_stats()

    def start_background_loop(self) -> None:
        """Bind the engine to the running event loop; the first request does so as well.

        Raises: RuntimeError if it is bound already.
        """
        if self._loop is not None:
            raise RuntimeError("the background loop is already running")
        self._bind()

    def shutdown_background_loop(self) -> None:
        """End the engine; see `shutdown`."""
        self.shutdown()

    def shutdown(self) -> None:
        """End the engine and its processes; safe to call twice, and after an error."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self._cause is None:
            self._cause = "the engine has been shut down"
            self._text.set_dead()
        if self._log_timer is not None:
            self._log_timer.cancel()
        for stream in self._streams.values():
            stream.put(EngineDeadError(self._cause))
        self._streams.clear()
        self._core.detach()
        self._core.shutdown()
