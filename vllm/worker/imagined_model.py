"""A model without memory: what its layers keep and ask for, found without its weights.

Built on the meta device, where tensors have shapes and nothing else. For commands that look at a
model and do not serve it.
"""

from __future__ import annotations

from typing import cast

import torch

from vllm.attention.backends.abstract import KernelQuery
from vllm.config import EngineConfig
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.model_loader.loader import get_model_architecture
from vllm.model_executor.models.interfaces import TextModel
from vllm.platforms import get_platform
from vllm.utils.tensors import to_torch_dtype
from vllm.worker.layer_setup import prepare_queries


class ImaginedRank(TensorParallel):
    """The first of several ranks that are not there: enough to size its share of a model."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size
        self._group = None


def imagine_model(config: EngineConfig) -> TextModel:
    """Return the first rank's share of a model on the meta device."""
    model_config = config.model_config
    cls, _ = get_model_architecture(model_config)
    with torch.device("meta"):
        module = cls(
            model_config.hf_config,
            dtype=to_torch_dtype(model_config.dtype),
            tp=ImaginedRank(config.parallel_config.tensor_parallel_size),
            cache_dtype=config.cache_config.cache_dtype,
            max_model_len=model_config.max_model_len,
        )
    return cast(TextModel, module)


def read_queries(config: EngineConfig) -> dict[int, KernelQuery]:
    """Return what each attention layer asks of a kernel on the first rank, as a worker would."""
    platform = get_platform(config.device_config.device)
    return prepare_queries(imagine_model(config), config, platform)
