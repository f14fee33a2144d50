"""Collectives over a process group, written so that a row's bits do not depend on its batch.

Called by `TensorParallel` only. Knows nothing of models or of what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total
    return add_in_rank_order(gather_tensors(tensor, group, size))


def add_in_rank_order(shares: Sequence[Tensor]) -> Tensor:
    """Return the sum of the ranks' shares, added in float32 and rounded once."""
    total = shares[0].float()
    for share in shares[1:]:
        total = total + share
    return total.to(shares[0].dtype)
