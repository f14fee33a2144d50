"""The synchronous engine: add requests, take steps, get outputs, all in the caller's thread.

`LLM` is built on it. Both halves live in this process; user functions (logits processors) may be
given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NoReturn

from vllm.config import EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from vllm.config.engine import DecodingConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.core import make_core
from vllm.engine.metrics import StatLoggerBase, StatRecorder
from vllm.engine.stats import EngineStats
from vllm.engine.text_side import TextSide
from vllm.errors import ConfigError, VllmError
from vllm.inputs import PromptType
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.prompt_adapter.request import PromptAdapterRequest
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLMEngine:
    """An engine driven by calls of `step`.

    Attributes:
        engine_config: resolved and frozen.
    """

    def __init__(
        self,
        engine_config: EngineConfig,
        *,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: dict[str, StatLoggerBase] | None = None,
    ) -> None:
        """Load the tokenizer and the model, lay out the cache.

        Args:
            engine_config: what to run.
            usage_context: accepted; nothing is reported to anyone.
            stat_loggers: instead of the log and Prometheus.

        Raises: VllmError saying what cannot be loaded or does not fit.
        """
        self.engine_config = engine_config
        self.usage_context = usage_context
        self._text = TextSide(
            engine_config, without_torch=False, is_remote=False, stat_loggers=stat_loggers
        )
        self._core = make_core(engine_config)
        self._text.set_ready(self._core.ready)
        self._failures: dict[str, VllmError] = {}

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: dict[str, StatLoggerBase] | None = None,
    ) -> LLMEngine:
        """Resolve the arguments and make the engine."""
        config = engine_args.create_engine_config()
        return cls(config, usage_context=usage_context, stat_loggers=stat_loggers)

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("an engine holds a model and processes; it cannot be pickled")

    def add_request(
        self,
        request_id: str,
        prompt: PromptType | None = None,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
        *,
        inputs: PromptType | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among open requests.
            prompt: text or ids.
            params: how to answer.
            arrival_time: seconds since the epoch; now if unset.
            lora_request: refused.
            trace_headers: accepted; traces are not exported.
            prompt_adapter_request: refused.
            priority: smaller is served earlier, under the priority policy.
            inputs: old name of `prompt`.

        Raises:
            RequestError: the request can never be served, and why.
            TypeError: prompt or params of a type that means nothing here.
            KeyError: the id is in use.
        """
        processed = self._text.process(
            request_id,
            inputs if prompt is None else prompt,
            params,
            priority=priority,
            arrival_time=arrival_time,
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
        )
        tokenizer = self._text.take_tokenizer_message(processed.message)
        if tokenizer is not None:
            self._core.handle(tokenizer)
        self._core.add_now(processed.message)
        self._text.open(processed)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests; unknown ids are ignored, no output follows."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for message in self._text.abort(ids).messages:
            self._core.handle(message)

    def step(self) -> list[RequestOutput]:
        """Take one step and return the outputs that are due.

        A request that failed while it ran appears with finish reason "error"; `take_failure` says
        why.

        Raises: EngineDeadError if the step failed; the engine is of no use after that.
        """
        results = self._core.step()
        done = self._text.apply(self._core.make_outputs(results))
        for message in done.messages:
            self._core.handle(message)
        for failed in done.failures:
            self._failures[failed.request_id] = failed.error
            done.outputs.append(failed.output)
        while self._core.num_steps_in_flight and not len(self._text.outputs):
            self._core.step()  # nobody waits: what still runs computes rows that have ended
        return done.outputs

    def take_failure(self, request_id: str) -> VllmError | None:
        """Return why a request failed while it ran, once; None if it did not."""
        return self._failures.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        """Whether some request has not ended."""
        return bool(len(self._text.outputs) or self._core.has_work)

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests have not ended."""
        return len(self._text.outputs)

    def get_tokenizer(self, lora_request: LoRARequest | None = None) -> PreTrainedTokenizerBase:
        """Return the tokenizer; RequestError where its initialisation was skipped."""
        return self._text.tokenizer

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Use another tokenizer from now on.

        Raises: RuntimeError while requests are open.
        """
        if len(self._text.outputs):
            raise RuntimeError("the tokenizer cannot be changed while requests run")
        self._text.set_tokenizer(tokenizer)

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration."""
        return self.engine_config.model_config

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The scheduler's configuration."""
        return self.engine_config.scheduler_config

    def get_model_config(self) -> ModelConfig:
        """Return the model's configuration."""
        return self.engine_config.model_config

    def get_parallel_config(self) -> ParallelConfig:
        """Return how the model is spread."""
        return self.engine_config.parallel_config

    def get_decoding_config(self) -> DecodingConfig:
        """Return the configuration of structured output."""
        return self.engine_config.decoding_config

    def get_scheduler_config(self) -> SchedulerConfig:
        """Return the scheduler's configuration."""
        return self.engine_config.scheduler_config

    def get_lora_config(self) -> None:
        """Return None: adapters are not served."""

    def add_logger(self, logger_name: str, logger: StatLoggerBase) -> None:
        """Give statistics to one more logger.

        Raises: RuntimeError if statistics are off, KeyError if the name is taken.
        """
        self._need_recorder().add(logger_name, logger)

    def remove_logger(self, logger_name: str) -> None:
        """Stop giving statistics to a logger; KeyError if there is none of that name."""
        self._need_recorder().remove(logger_name)

    def _need_recorder(self) -> StatRecorder:
        if not self.engine_config.observability_config.log_stats:
            raise RuntimeError("statistics are off; make the engine with disable_log_stats=False")
        return self._text.recorder

    def do_log_stats(self) -> None:
        """Give the loggers the state of now."""
        self._text.record_idle()

    def stats(self) -> EngineStats:
        """Return one snapshot of requests, blocks and kernels."""
        return self._text.make_stats()

    def check_health(self) -> None:
        """Raise EngineDeadError if a rank has ended."""
        self._core.check_health()

    def start_profile(self) -> NoReturn:
        """Refuse: there is no profiler."""
        raise RuntimeError("there is no built-in profiler; run the process under one")

    def stop_profile(self) -> NoReturn:
        """Refuse: there is no profiler."""
        raise RuntimeError("there is no built-in profiler; run the process under one")

    def is_tracing_enabled(self) -> bool:
        """Return False: traces are not exported."""
        return False

    def is_encoder_decoder_model(self) -> bool:
        """Return False: such models are not served."""
        return False

    def is_embedding_model(self) -> bool:
        """Return False: such models are not served."""
        return False

    def add_lora(self, lora_request: LoRARequest) -> NoReturn:
        """Refuse: adapters are not served."""
        raise ConfigError("LoRA adapters are not served; merge the adapter into the model")

    def shutdown(self) -> None:
        """Free the model and end the ranks; safe to call twice."""
        self._core.shutdown()
