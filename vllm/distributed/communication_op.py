"""Collectives over a process group, written so that a row's bits do not depend on its batch.

Called by `TensorParallel` only. Knows nothing of models or of what the tensors mean.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def gather_tensors(tensor: Tensor, group: dist.ProcessGroup, size: int) -> list[Tensor]:
    """Return every rank's `tensor`, in rank order; all have one shape and dtype."""
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor, group=group)
    return parts


def gather_ranks(tensor: Tensor, group: dist.ProcessGroup, size: int, dim: int) -> Tensor:
    """Return every rank's `tensor` joined along `dim`, in rank order."""
    return torch.cat(gather_tensors(tensor, group, size), dim=dim)


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """Return the sum of `tensor` over the ranks.

    NCCL adds in the order of its own algorithm. On gloo the parts are gathered and added in rank
    order, in float32: its ring adds an element in an order that depends on where it lies in the
    buffer, so that a token's bits would change with the batch it is in.
    """
    if dist.get_backend(group) != "gloo":
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total
    parts = gather_tensors(tensor, group, size)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(tensor.dtype)
