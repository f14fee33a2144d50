"""Kernels that begin while the one before still runs: programmatic dependent launch. Triton.

Called by the kernels of a decode step, whose way in and out would else cost as much as a small
kernel's work. A kernel may first prefetch what no kernel of a step writes (weights). It calls
`await_inputs` on every path before it reads or writes anything else: only then the results of all
kernels before it are seen, and whoever waits for this kernel has waited for those too. After that,
not before, it calls `let_next_start`, so that one kernel waits at a time; a product calls it when
it has read its weight, which would else drive out what the next one prefetches. Launched with
`OVERLAPS=overlaps(device), launch_pdl=overlaps(device)`. Where devices cannot overlap, nothing of
it is compiled.

Off unless VLLM_OVERLAP_KERNELS is set.

Source: the PTX manual, `griddepcontrol`, `prefetch` and `cp.async.bulk.prefetch`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm import envs
from vllm._custom_ops.triton.device import is_hopper

LINE_BYTES = 128
"""What one of `prefetch_lines` asks for."""

SPAN_BYTES = 16
"""Spans start at multiples of it and have multiples of it."""


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Return whether kernels on a device may and can begin before their inputs are there."""
    return is_hopper(device) and bool(envs.VLLM_OVERLAP_KERNELS)


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr):
    """Let the next kernel begin where there is room, as soon as every program has said so."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def await_inputs(OVERLAPS: tl.constexpr):
    """Wait until the kernels before have ended and what they wrote is seen."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def prefetch_lines(places, OVERLAPS: tl.constexpr):
    """Ask L2 for the line of 128 bytes around each of `places`, a tensor of pointers.

    Every thread asks for its elements: give at least as many as a program has threads.
    """
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [places], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def prefetch_spans(starts, num_bytes, OVERLAPS: tl.constexpr):
    """Ask L2 for `num_bytes` from each of `starts` on, both multiples of 16; none where it is 0.

    One instruction a span. Every thread asks for its elements, as in `prefetch_lines`.
    """
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "{ .reg .pred %any; setp.gt.s32 %any, $2, 0; "
            "@%any cp.async.bulk.prefetch.L2.global [$1], $2; } // $0",
            "=r,l,r",
            [starts, num_bytes],
            tl.int32,
            is_pure=False,
            pack=1,
        )
