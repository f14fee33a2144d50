"""Sees that ops write to no argument but those that their schemas mark as written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class WriteWatch(TorchDispatchMode):
    """Compares what our ops read before and after each call, on CPUs.

    Memory that is also given to be written is left out: outputs may be inputs, and the blocks of
    one arena are arguments of both kinds.

    Args:
        namespaces: torch's, of the ops that are watched.
    """

    def __init__(self, *namespaces: str) -> None:
        super().__init__()
        self._namespaces = namespaces

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace not in self._namespaces:
            return func(*args, **(kwargs or {}))
        read, written = dict[str, Tensor](), set[int]()
        for argument, given in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for i, tensor in enumerate(list_cpu_tensors(given)):
                if is_written:
                    written.add(tensor.untyped_storage().data_ptr())
                else:
                    read[f"{argument.name}[{i}]"] = tensor
        kept = {
            name: (tensor, tensor.clone())
            for name, tensor in read.items()
            if tensor.untyped_storage().data_ptr() not in written
        }
        result = func(*args, **(kwargs or {}))
        for name, (tensor, before) in kept.items():
            is_same = torch.equal(tensor.nan_to_num(), before.nan_to_num())
            assert is_same, f"{func._schema} has written to {name}"
        return result


def list_cpu_tensors(given: Any) -> Iterator[Tensor]:
    """Yield the tensors on CPUs of one argument."""
    for value in given if isinstance(given, list | tuple) else (given,):
        if isinstance(value, Tensor) and value.device.type == "cpu":
            yield value
