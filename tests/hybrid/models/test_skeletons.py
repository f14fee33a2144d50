"""Models are built on the meta device first, which must take no time to speak of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.hybrid.models.families import HYBRID_WRITERS
from vllm import EngineArgs
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.model_loader.loader import get_model_architecture
from vllm.utils.tensors import to_torch_dtype

CHEAP = {"empty", "detach", "slice", "zero_", "fill_", "_to_copy"}
"""Others import torch's tracing compiler when they are first called there: a second or more."""


class Ops(TorchDispatchMode):
    """Keeps the names of the ops that make or take tensors of the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See torch."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(isinstance(t, Tensor) and t.is_meta for t in (result, *args)):
            self.names.add(func.overloadpacket.__name__)
        return result


@pytest.mark.parametrize("name", HYBRID_WRITERS)
def test_skeletons_take_cheap_ops_alone(name: str, tmp_path: Path) -> None:
    write: Callable[[Path], object] = HYBRID_WRITERS[name]
    write(tmp_path)
    config = EngineArgs(
        model=str(tmp_path), device="cpu", skip_tokenizer_init=True, max_model_len=64
    ).create_engine_config()
    cls, _ = get_model_architecture(config.model_config)
    dtype = to_torch_dtype(config.model_config.dtype)
    with Ops() as ops, torch.device("meta"):
        cls(
            config.model_config.hf_config,
            dtype=dtype,
            tp=TensorParallel.single(),
            max_model_len=64,
        )
    assert ops.names <= CHEAP
