"""vllm-hybrid: an LLM inference engine in the shape of vLLM 0.6.3.

The public names load on first use, so that `import vllm` stays fast and imports no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm.logger import configure_logging
from vllm.version import __version__, __version_tuple__

if sys.platform == "win32":
    raise ImportError(
        "vllm has no compiled ops for Windows. Run it inside WSL2 with Ubuntu 22.04 or later: "
        "https://learn.microsoft.com/windows/wsl/install"
    )

configure_logging()

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine
    from vllm.engine.llm_engine import LLMEngine
    from vllm.entrypoints.llm import LLM
    from vllm.executor.ray_utils import initialize_ray_cluster
    from vllm.inputs import PromptType, TextPrompt, TokensPrompt
    from vllm.model_executor.models import ModelRegistry
    from vllm.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        RequestOutput,
    )
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams

_HOMES = {
    "LLM": "vllm.entrypoints.llm",
    "ModelRegistry": "vllm.model_executor.models",
    "PromptType": "vllm.inputs",
    "TextPrompt": "vllm.inputs",
    "TokensPrompt": "vllm.inputs",
    "SamplingParams": "vllm.sampling_params",
    "RequestOutput": "vllm.outputs",
    "CompletionOutput": "vllm.outputs",
    "EmbeddingOutput": "vllm.outputs",
    "EmbeddingRequestOutput": "vllm.outputs",
    "LLMEngine": "vllm.engine.llm_engine",
    "EngineArgs": "vllm.engine.arg_utils",
    "AsyncLLMEngine": "vllm.engine.async_llm_engine",
    "AsyncEngineArgs": "vllm.engine.arg_utils",
    "initialize_ray_cluster": "vllm.executor.ray_utils",
    "PoolingParams": "vllm.pooling_params",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "ModelRegistry",
    "PoolingParams",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
    "initialize_ray_cluster",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'vllm' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
