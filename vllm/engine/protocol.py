"""The engine as its callers see it.

`AsyncLLMEngine` implements this protocol, in process or as the API-process end of a separate
engine process; the HTTP server, the benchmarks and the tests use nothing else. No torch, no HTTP
here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.config import ModelConfig
    from vllm.engine.stats import EngineStats
    from vllm.inputs import PromptType
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import BeamSearchParams, SamplingParams


class EngineClient(Protocol):
    """A running engine.

    A request whose consumer goes away (the generator is closed or its task cancelled) is aborted.
    """

    @property
    def is_running(self) -> bool:
        """Whether requests can be served now."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether the engine has ended, by request or by an error."""
        ...

    @property
    def errored(self) -> bool:
        """Whether the engine has ended by an error."""
        ...

    @property
    def dead_error(self) -> BaseException:
        """The error that every open and later request gets."""
        ...

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request; yields as `sampling_params.output_kind` asks.

        Raises:
            RequestError: the request cannot be served; raised by the first `anext`.
            EngineDeadError: the engine has ended.
        """
        ...

    def beam_search(
        self, prompt: PromptType, request_id: str, params: BeamSearchParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a beam search; yields one finished output, best beam first."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        ...

    async def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer; raises RequestError where tokenizer init was skipped."""
        ...

    async def get_model_config(self) -> ModelConfig:
        """Return the resolved model config."""
        ...

    async def stats(self) -> EngineStats:
        """Return one snapshot of requests, blocks and kernels, describing now."""
        ...

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has ended; runs no forward pass."""
        ...

    def shutdown(self) -> None:
        """End the engine and its processes; safe to call twice, and after an error."""
        ...
