"""The caller's half of an engine: requests in, outputs and statistics out.

`LLMEngine` and `AsyncLLMEngine` own one each and differ only in how they drive the other half.
Loads the tokenizer, keeps the open requests and the latest counts of the engine side. No torch, no
waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.config import EngineConfig
from vllm.engine.input_processor import InputProcessor, ProcessedRequest
from vllm.engine.messages import (
    AddRequest,
    CoreStats,
    EngineOutputs,
    EngineReady,
    SetTokenizer,
)
from vllm.engine.metrics import (
    StatLoggerBase,
    StatRecorder,
    describe_cache_config,
    make_default_loggers,
)
from vllm.engine.open_request import OpenRequest
from vllm.engine.output_processor import OutputProcessor, ProcessedOutputs
from vllm.engine.stats import EngineStats, make_engine_stats
from vllm.errors import RequestError
from vllm.hybrid.report import describe_settings
from vllm.lora.request import LoRARequest
from vllm.prompt_adapter.request import PromptAdapterRequest
from vllm.transformers_utils.detokenizer import TokenBytes
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.utils import Counter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextSide:
    """Everything of an engine that knows text.

    Attributes:
        config: of the engine.
        inputs, outputs: the two processors.
        recorder: takes statistics; without loggers when they are switched off.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        without_torch: bool,
        is_remote: bool,
        stat_loggers: dict[str, StatLoggerBase] | None = None,
    ) -> None:
        """Load the tokenizer.

        Args:
            config: of the engine.
            without_torch: keep torch out of this process.
            is_remote: whether results may come late, after their request was closed here.
            stat_loggers: instead of the log and Prometheus.
        """
        self.config = config
        model = config.model_config
        tokenizer = None
        if not model.skip_tokenizer_init:
            tokenizer = get_tokenizer(
                model.tokenizer,
                model.tokenizer_mode,
                revision=model.tokenizer_revision,
                trust_remote_code=model.trust_remote_code,
                download_dir=config.load_config.download_dir,
                without_torch=without_torch,
            )
        self.recorder = StatRecorder({})
        if config.observability_config.log_stats:
            if stat_loggers is None:
                stat_loggers = make_default_loggers(model.served_model_name, model.max_model_len)
            self.recorder = StatRecorder(stat_loggers)
        self._ready: EngineReady | None = None
        self._core_stats = CoreStats()
        self._queue_time_s = 0.0
        self._num_queued = 0
        self._is_alive = True
        self._is_remote = is_remote
        self._counter = Counter()
        self._hybrid = describe_settings(config.hybrid)
        self.set_tokenizer(tokenizer)

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Use another tokenizer; no request may be open."""
        self.inputs = InputProcessor(
            self.config.model_config, self.config.scheduler_config, tokenizer
        )
        self.outputs = OutputProcessor(None if tokenizer is None else TokenBytes(tokenizer))
        self._is_tokenizer_told = False

    def set_ready(self, ready: EngineReady) -> None:
        """Take the facts of the engine side's start."""
        self._ready = ready
        self._core_stats = CoreStats(
            groups=ready.groups, num_free_superblocks=ready.num_free_superblocks
        )
        facts = describe_cache_config(self.config.cache_config, ready.num_gpu_blocks)
        for stat_logger in self.recorder.loggers.values():
            stat_logger.info(type="cache_config", obj=facts)

    def set_dead(self) -> None:
        """The engine side has ended."""
        self._is_alive = False

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; RequestError where its initialisation was skipped."""
        if self.inputs.tokenizer is None:
            raise RequestError(
                "the engine was started with skip_tokenizer_init; it has no tokenizer"
            )
        return self.inputs.tokenizer

    def process(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        takes_callables: bool = True,
    ) -> ProcessedRequest:
        """Check a request and turn it into messages; nothing is opened yet.

        Raises: RequestError or TypeError saying what is wrong with it.
        """
        if lora_request is not None or prompt_adapter_request is not None:
            raise RequestError("adapters are not served; merge the adapter into the model")
        if request_id in self.outputs:
            raise KeyError(
                f"request {request_id!r} is running already; give each request its own id"
            )
        processed = self.inputs.process(
            request_id,
            prompt,
            params,
            priority=priority,
            arrival_time=arrival_time,
            engine_id=f"{request_id}#{next(self._counter)}" if self._is_remote else None,
        )
        if processed.request.logits_processors and not takes_callables:
            raise RequestError(
                "logits_processors are Python functions and cannot cross to the engine process; "
                "use the LLM class, or start the server with --disable-frontend-multiprocessing",
                param="logits_processors",
            )
        return processed

    def open(self, processed: ProcessedRequest) -> OpenRequest:
        """Keep a request until it ends."""
        return self.outputs.add(processed)

    def take_tokenizer_message(self, message: AddRequest) -> SetTokenizer | None:
        """Return what must be sent before `message`: the tokenizer, before the first form.

        Raises: RequestError where the tokenizer is not a fast one.
        """
        if message.grammar is None or self._is_tokenizer_told:
            return None
        tokenizer = self.tokenizer
        if not tokenizer.is_fast or self.inputs.eos_token_id is None:
            raise RequestError(
                "structured output needs a fast tokenizer with an end token; this model has none",
                param="guided_decoding",
            )
        self._is_tokenizer_told = True
        return SetTokenizer(
            json=tokenizer.backend_tokenizer.to_str(), eos_token_id=self.inputs.eos_token_id
        )

    def apply(self, outputs: EngineOutputs) -> ProcessedOutputs:
        """Take a step's results and counts."""
        self._core_stats = outputs.stats
        return self._record(self.outputs.process(outputs))

    def abort(self, request_ids: Iterable[str]) -> ProcessedOutputs:
        """Close requests; see `OutputProcessor.abort`."""
        return self._record(self.outputs.abort(request_ids))

    def _record(self, done: ProcessedOutputs) -> ProcessedOutputs:
        self._queue_time_s += sum(done.stats.times_in_queue_s)
        self._num_queued += len(done.stats.times_in_queue_s)
        if self.recorder.loggers:
            self.recorder.record(self.make_stats(), done.stats)
        return done

    def record_idle(self) -> None:
        """Give the loggers the state of now, although nothing happened."""
        self._record(ProcessedOutputs())

    def make_stats(self) -> EngineStats:
        """Return a snapshot of now."""
        if self._ready is None:
            return EngineStats(scheduler_running=False)
        stats = make_engine_stats(
            self._core_stats,
            self._ready,
            is_alive=self._is_alive,
            has_prefix_caching=self.config.cache_config.enable_prefix_caching,
            avg_queue_time_ms=1000 * self._queue_time_s / max(1, self._num_queued),
        )
        return replace(stats, hybrid=self._hybrid)
