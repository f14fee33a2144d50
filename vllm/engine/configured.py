"""What an asynchronous engine answers by itself, without its engine side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from vllm.config import (
    DecodingConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from vllm.engine.metrics import StatLoggerBase
from vllm.engine.text_side import TextSide
from vllm.errors import RequestError
from vllm.inputs import PromptType
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ConfiguredEngine:
    """The base of AsyncLLMEngine: configuration and text side, behind the names of 0.6.3.

    Attributes:
        engine_config: resolved and frozen.
    """

    _text: TextSide

    def __init__(self, engine_config: EngineConfig) -> None:
        """Keep the configuration; the text side follows."""
        self.engine_config = engine_config

    async def get_model_config(self) -> ModelConfig:
        """Return the model's configuration."""
        return self.engine_config.model_config

    async def get_parallel_config(self) -> ParallelConfig:
        """Return how the model is spread."""
        return self.engine_config.parallel_config

    async def get_decoding_config(self) -> DecodingConfig:
        """Return the configuration of structured output."""
        return self.engine_config.decoding_config

    async def get_scheduler_config(self) -> SchedulerConfig:
        """Return the scheduler's configuration."""
        return self.engine_config.scheduler_config

    async def get_lora_config(self) -> None:
        """Return None: adapters are not served."""

    async def is_tracing_enabled(self) -> bool:
        """Return False: traces are not exported."""
        return False

    async def start_profile(self) -> NoReturn:
        """Refuse: there is no profiler."""
        raise RuntimeError("there is no built-in profiler; run the process under one")

    async def stop_profile(self) -> NoReturn:
        """Refuse: there is no profiler."""
        raise RuntimeError("there is no built-in profiler; run the process under one")

    async def get_tokenizer(
        self, lora_request: LoRARequest | None = None
    ) -> PreTrainedTokenizerBase:
        """Return the tokenizer; RequestError where its initialisation was skipped."""
        return self._text.tokenizer

    async def do_log_stats(self) -> None:
        """Give the loggers the state of now."""
        self._text.record_idle()

    def add_logger(self, logger_name: str, logger: StatLoggerBase) -> None:
        """Give statistics to one more logger; KeyError if the name is taken."""
        self._text.recorder.add(logger_name, logger)

    def remove_logger(self, logger_name: str) -> None:
        """Stop giving statistics to a logger; KeyError if there is none of that name."""
        self._text.recorder.remove(logger_name)

    def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> NoReturn:
        """Refuse at once, awaited or iterated over: embedding models are not served."""
        raise RequestError("embedding models are not served; use generate")
