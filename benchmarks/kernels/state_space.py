"""State ops of two models on a GPU: times, and their shares of what the machine can do.

Run by hand on a GPU (`python -m benchmarks.kernels.state_space`). A decode step is bound by reading
and writing the states, a prompt by its products: the shares are of a copy and of a square product
measured in the same run. Prints a JSON line for each op and load.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kernels.graph_timer import count_copies, measure_copy_bytes_per_s, measure_us
from vllm._custom_ops.triton import (
    causal_conv,
    delta_chunks,
    delta_rule,
    delta_step,
    gated_norm,
    mamba2,
    mamba2_chunks,
    mamba2_step,
)

UNIT_BYTES = 256
KEY_HEADS, HEADS, SIZE = 16, 32, 128  # Qwen3-Next
MAMBA_HEADS, MAMBA_SIZE, GROUPS, STATE = 128, 64, 8, 128  # Nemotron-H
TAPS = 4
MATRIX = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Rows of a step, all of one length."""

    num_rows: int
    length: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.num_rows * self.length

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token."""
        return self.length == 1

    def rows(self, state_bytes: int, lens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return offsets of neighbouring states, cu_query_lens and `lens` for every row."""
        units = torch.arange(self.num_rows, device="cuda") * (state_bytes // UNIT_BYTES)
        bounds = torch.arange(self.num_rows + 1, device="cuda") * self.length
        return units.int(), bounds.int(), torch.full_like(units, lens).int()


LOADS = (
    Load(num_rows=1, length=1),
    Load(num_rows=8, length=1),
    Load(num_rows=64, length=1),
    Load(num_rows=1, length=8192),
    Load(num_rows=4, length=8192),
    Load(num_rows=16, length=512),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One op over one load.

    Attributes:
        calls: the same work over states of their own, so that no cache holds them.
        num_bytes: read and written at least.
        num_flops: of products, as the chunked form needs them; 0 where memory is the limit.
    """

    op: str
    load: Load
    calls: Sequence[Callable[[], object]]
    num_bytes: int
    num_flops: int = 0


def draw(*shape: int) -> Tensor:
    """Return normal numbers in bfloat16."""
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def draw_floats(size: int) -> Tensor:
    """Return normal numbers in float32."""
    return torch.randn(size, device="cuda")


def make_states(load: Load, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Return states of all rows as a cache shows them, as often as makes every call a cold one."""
    size = torch.Size(shape).numel()
    unit = UNIT_BYTES // dtype.itemsize
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    states = []
    for _ in range(count_copies(load.num_rows * size * dtype.itemsize)):
        flat = torch.zeros(load.num_rows * size, dtype=dtype, device="cuda")
        num_units = (load.num_rows - 1) * size // unit + 1
        states.append(flat.as_strided((num_units, *shape), (unit, *strides)))
    return states


def make_window(load: Load, channels: int, stride: int) -> Tensor:
    """Return what convolutions remember, as a cache shows it; its units lie like those of states.

    Args:
        stride: bytes from one row's state to the next.
    """
    item = torch.bfloat16.itemsize
    flat = torch.zeros(load.num_rows * stride // item, dtype=torch.bfloat16, device="cuda")
    units = (load.num_rows - 1) * (stride // UNIT_BYTES) + 1
    shape = (units, TAPS - 1, channels)
    return flat.as_strided(shape, (UNIT_BYTES // item, channels, 1)).transpose(1, 2)


def make_delta(load: Load, kept: torch.dtype = torch.float32) -> Work:
    """The gated delta rule: in a decode step with convolution, gates and norm, else alone."""
    shape = (HEADS, SIZE, SIZE)
    states = make_states(load, shape, kept)
    state_bytes = HEADS * SIZE * SIZE * kept.itemsize
    num_tokens = load.num_tokens
    q, k = (draw(num_tokens, KEY_HEADS, SIZE) for _ in range(2))
    v, gate = (draw(num_tokens, HEADS, SIZE) for _ in range(2))
    out = torch.empty_like(v)
    a_log, dt_bias = draw_floats(HEADS), draw_floats(HEADS)
    num_bytes = 2 * load.num_rows * state_bytes + 3 * v.numel() * 2
    if load.is_decode:
        a, b = draw(num_tokens, HEADS), draw(num_tokens, HEADS)
        channels = (2 * KEY_HEADS + HEADS) * SIZE
        rows, weight, filters = load.rows(state_bytes, 9), draw(SIZE), draw(TAPS, channels).T
        conv_state = make_window(load, channels, state_bytes)
        call = partial(
            delta_step.gated_delta_step, out, draw(num_tokens, channels), a, b, gate, filters,
            a_log, dt_bias, weight, conv_state,
        )  # fmt: skip
        calls = [partial(call, state, *rows, SIZE**-0.5, 1e-6) for state in states]
        return Work(op="gated_delta_step", load=load, calls=calls, num_bytes=num_bytes)
    g = -draw_floats(num_tokens * HEADS).abs().view(num_tokens, HEADS)
    beta = draw_floats(num_tokens * HEADS).sigmoid().view(num_tokens, HEADS)
    rows = load.rows(state_bytes, 8)
    call = partial(delta_rule.gated_delta_rule, out, q, k, v, g, beta)
    calls = [partial(call, state, *rows, SIZE**-0.5, True) for state in states[:2]]
    # K K', Q K', T K, T V, then W S, Q S, P U, K' U: a chunk of 64 rows and SIZE columns each.
    num_flops = 2 * num_tokens * HEADS * (5 * 64 * SIZE + 3 * SIZE * SIZE)
    return Work(
        op="gated_delta_rule", load=load, calls=calls, num_bytes=num_bytes, num_flops=num_flops
    )


def make_mamba(load: Load, kept: torch.dtype = torch.float32) -> Work:
    """The Mamba-2 scan: in a decode step with convolution and norm."""
    states = make_states(load, (MAMBA_HEADS, MAMBA_SIZE, STATE), kept)
    state_bytes = MAMBA_HEADS * MAMBA_SIZE * STATE * kept.itemsize
    num_tokens = load.num_tokens
    x, dt = draw(num_tokens, MAMBA_HEADS, MAMBA_SIZE), draw(num_tokens, MAMBA_HEADS)
    b, c = (draw(num_tokens, GROUPS, STATE) for _ in range(2))
    out = torch.empty_like(x)
    a_log, skip, dt_bias = (draw_floats(MAMBA_HEADS) for _ in range(3))
    limits = (0.0, float("inf"))
    num_bytes = 2 * load.num_rows * state_bytes + 2 * x.numel() * 2
    if load.is_decode:
        channels = MAMBA_HEADS * MAMBA_SIZE + 2 * GROUPS * STATE
        xbc, gate = draw(num_tokens, channels), draw(num_tokens, MAMBA_HEADS * MAMBA_SIZE)
        rows, filters = load.rows(state_bytes, 9), draw(TAPS, channels).T
        conv_state = make_window(load, channels, state_bytes)
        call = partial(
            mamba2_step.mamba2_step, out, xbc, dt, gate, filters, draw(channels), a_log, skip,
            dt_bias, draw(gate.shape[1]), conv_state,
        )  # fmt: skip
        calls = [partial(call, state, *rows, *limits, 1e-6) for state in states]
        return Work(op="mamba2_step", load=load, calls=calls, num_bytes=num_bytes)
    rows = load.rows(state_bytes, 8)
    call = partial(mamba2.mamba2_scan, out, x, dt, -a_log.exp(), b, c, skip, dt_bias)
    calls = [partial(call, state, *rows, *limits) for state in states[:2]]
    num_flops = 2 * num_tokens * MAMBA_HEADS * (64 * MAMBA_SIZE + 2 * MAMBA_SIZE * STATE)
    num_flops += 2 * num_tokens * GROUPS * 64 * STATE
    return Work(op="mamba2_scan", load=load, calls=calls, num_bytes=num_bytes, num_flops=num_flops)


def make_conv(load: Load) -> Work:
    """The convolution of Qwen3-Next's queries, keys and values."""
    channels = (2 * KEY_HEADS + HEADS) * SIZE
    states = make_states(load, (TAPS - 1, channels), torch.bfloat16)
    x, weight = draw(load.num_tokens, channels), draw(TAPS, channels).T
    out = torch.empty_like(x)
    state_bytes = (TAPS - 1) * channels * 2
    num_bytes = 2 * x.numel() * 2 + 2 * load.num_rows * state_bytes
    if load.is_decode:
        rows = load.rows(state_bytes, 9)
        call = partial(causal_conv.causal_conv1d_step, out, x, None, None, weight, None)
        name = "causal_conv1d_step"
    else:
        rows = load.rows(state_bytes, 8)
        call = partial(causal_conv.causal_conv1d, out, x, weight, None)
        name = "causal_conv1d"
    calls = [partial(call, state.transpose(1, 2), *rows, True) for state in states]
    return Work(op=name, load=load, calls=calls, num_bytes=num_bytes)


def make_norm(load: Load) -> Work:
    """The gated norm of Nemotron-H's groups."""
    channels = MAMBA_HEADS * MAMBA_SIZE
    x, gate, weight = (
        draw(load.num_tokens, channels),
        draw(load.num_tokens, channels),
        draw(channels),
    )
    call = partial(gated_norm.gated_rms_norm, torch.empty_like(x), x, gate, weight, 1e-6)
    calls = [partial(call, channels // GROUPS, True)]
    return Work(op="gated_rms_norm", load=load, calls=calls, num_bytes=3 * x.numel() * 2)


def measure_flops_per_s() -> float:
    """Return the operations of a large square product, each second."""
    a, b = draw(MATRIX, MATRIX), draw(MATRIX, MATRIX)
    return 2 * MATRIX**3 / (measure_us([lambda: a @ b]) * 1e-6)


def choose_forms(args: argparse.Namespace) -> None:
    """Let kernels take the forms that the command line names; a named form runs on every GPU."""
    mamba_forms = (args.mamba_form, args.many_programs)
    if args.any_gpu or any(form is not None for form in mamba_forms):
        patch.object(mamba2, "can_walk", lambda scan: False).start()
    if args.any_gpu or args.delta_form is not None:
        patch.object(delta_chunks, "can_pass", lambda *tensors: False).start()
    if args.few_heads is not None:
        mamba2_step.FEW_HEADS = args.few_heads
    if args.value_block is not None:
        delta_step.VALUE_BLOCK = args.value_block
    if args.delta_form is not None:
        stages, programs, is_grouped = map(int, args.delta_form.split(","))
        delta_chunks.PASS_STAGES, delta_chunks.MANY_PROGRAMS = stages, programs
        if is_grouped:
            for kernel in (delta_chunks._delta_chunk_kernel, delta_chunks._delta_pass_kernel):
                kernel.compiled_in = nullcontext
    if args.many_programs is not None:
        mamba2_chunks.MANY_PROGRAMS = args.many_programs
    if args.mamba_form is not None:
        form = tuple(map(int, args.mamba_form.split(",")))
        mamba2_chunks.CHUNK, mamba2_chunks.STATE_WARPS = form[:2]
        mamba2_chunks.STATE_STAGES, mamba2_chunks.OUTPUT_STAGES = form[2:]


@torch.inference_mode()
def main() -> None:
    """Print a JSON line for each op and load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of an op's name")
    parser.add_argument("--any-gpu", action="store_true", help="not Hopper's kernels of prompts")
    parser.add_argument("--few-heads", type=int, help="rows x heads for the tiles of few heads")
    parser.add_argument("--many-programs", type=int, help="programs for the tiles of many")
    parser.add_argument("--value-block", type=int, help="columns of a delta rule's step")
    parser.add_argument(
        "--delta-form", help="chunks in flight, programs for wide slices, wgmma (0 or 1)"
    )
    parser.add_argument(
        "--mamba-form",
        help="tokens of a chunk, warps and tiles in flight of its states, tiles of its outputs",
    )
    parser.add_argument(
        "--state-dtype", default="float32", choices=("float32", "bfloat16", "float16")
    )
    args = parser.parse_args()
    kept = getattr(torch, args.state_dtype)
    choose_forms(args)
    copy_rate, flop_rate = measure_copy_bytes_per_s(), measure_flops_per_s()
    machine = {"copy_tb_per_s": copy_rate / 1e12, "product_tflops": flop_rate / 1e12}
    print(json.dumps({name: round(rate, 2) for name, rate in machine.items()}), flush=True)
    for make in (
        partial(make_delta, kept=kept),
        partial(make_mamba, kept=kept),
        make_conv,
        make_norm,
    ):
        for load in LOADS:
            work = make(load)
            if args.only not in work.op:
                continue
            time_us = measure_us(work.calls)
            line = {
                "op": work.op,
                "rows": load.num_rows,
                "tokens_a_row": load.length,
                "us": round(time_us, 2),
                "share_of_copy": round(work.num_bytes / copy_rate * 1e6 / time_us, 3),
            }
            if work.num_flops:
                line["tflops"] = round(work.num_flops / time_us / 1e6, 1)
                line["share_of_product"] = round(work.num_flops / flop_rate * 1e6 / time_us, 3)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
