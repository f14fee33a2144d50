"""Counters of the programs that have stored their parts, of which the last one adds them up.

Read and reset by `linear.py`, `moe_*.py` and `attention_decode.py`. One kernel after the other uses
them, from the first on: each waits for those before it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.errors import KernelError

NUM_COUNTERS = 1 << 16


@functools.cache
def get_counters(device: torch.device) -> Tensor:
    """Return the arrival counters of a device, int32 [NUM_COUNTERS], all zero between two kernels.

    Kernels that use them must run on one stream.

    Raises:
        KernelError: first asked for while a graph is captured, which would record their zeroing.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise KernelError(
            "kernels that count arrivals cannot run for the first time while a CUDA graph is "
            "captured; run the step once before the capture"
        )
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def is_last_to_arrive(counter, num_programs):
    """Whether all other programs have stored their parts; the last one resets the counter."""
    tl.debug_barrier()  # the atomic is one thread's: the stores of the others come before it
    is_last = tl.atomic_add(counter, 1) == num_programs - 1
    if is_last:
        tl.store(counter, 0)
    return is_last
