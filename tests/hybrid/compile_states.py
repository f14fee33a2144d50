"""Compiles the kernels of layers with a state for a GPU that is not there.

python -m tests.hybrid.compile_states 80        # or 90; as tests/_custom_ops/triton/compile_for.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch

from tests._custom_ops.triton.compile_for import BF16, main
from tests.utils.states import make_conv_state, make_state_rows
from vllm._custom_ops.triton import causal_conv, delta_rule, gated_norm, mamba2

DECODE, PROMPTS = [1, 1], [300, 90]


def scan_deltas(new_lens: list[int], *, size: int = 128) -> None:
    """Qwen3-Next's linear attention, or one of other sizes."""
    num_tokens, keys, values = sum(new_lens), 16 * size, 32 * size
    wide = torch.zeros(num_tokens, 2 * keys + values, dtype=BF16)
    q, k, v = (t.unflatten(-1, (-1, size)) for t in wide.split((keys, keys, values), -1))
    g, beta = torch.zeros(num_tokens, 32), torch.zeros(num_tokens, 32)
    rows = make_state_rows((32, size, size), torch.float32, new_lens, [7] * len(new_lens), "cpu")
    out = torch.zeros(num_tokens, 32, size, dtype=BF16)
    delta_rule.gated_delta_rule(out, q, k, v, g, beta, rows.view, *rows.before, 0.1, True)


def scan_mamba(
    new_lens: list[int],
    *,
    size: int = 64,
    state: int = 128,
    kept: torch.dtype = torch.float32,
    is_plain: bool = False,
) -> None:
    """Nemotron-H's Mamba-2, or one of other sizes; plain without D and bias."""
    num_tokens, inner, shared = sum(new_lens), 128 * size, 8 * state
    wide = torch.zeros(num_tokens, inner + 2 * shared + 128, dtype=BF16)
    x, b, c, dt = wide.split((inner, shared, shared, 128), -1)
    b, c, x = b.unflatten(-1, (8, state)), c.unflatten(-1, (8, state)), x.unflatten(-1, (128, size))
    rows = make_state_rows((128, size, state), kept, new_lens, [7] * len(new_lens), "cpu")
    ones = torch.ones(128)
    more = None if is_plain else ones
    mamba2.mamba2_scan(
        torch.zeros_like(x), x, dt, -ones, b, c, more, more, rows.view, *rows.before, 0.0, 1e30
    )


def step_deltas() -> None:
    """A decode step of Qwen3-Next's linear attention."""
    keys, values = 16 * 128, 32 * 128
    rows = make_state_rows((32, 128, 128), torch.float32, DECODE, [7, 7], "cpu")
    wide = torch.zeros(2, 2 * keys + 2 * values + 64, dtype=BF16)
    qkv, gate, a, b = wide.split((2 * keys + values, values, 32, 32), -1)
    weight = torch.zeros(4, 2 * keys + values, dtype=BF16).T
    conv_state = make_conv_state(rows, 2 * keys + values, 4, BF16)
    ones, norm = torch.ones(32), torch.ones(128, dtype=BF16)
    out = torch.zeros(2, 32, 128, dtype=BF16)
    delta_rule.gated_delta_step(
        out, qkv, a, b, gate.unflatten(-1, (32, 128)), weight, ones, ones, norm, conv_state,
        rows.view, *rows.after, 0.1, 1e-6,
    )  # fmt: skip


def step_mamba(num_rows: int) -> None:
    """A decode step of Nemotron-H's Mamba-2."""
    inner, mixed = 128 * 64, 128 * 64 + 2 * 8 * 128
    lens = ([1] * num_rows, [7] * num_rows)
    rows = make_state_rows((128, 64, 128), torch.float32, *lens, "cpu")
    wide = torch.zeros(num_rows, inner + mixed + 128, dtype=BF16)
    gate, xbc, dt = wide.split((inner, mixed, 128), -1)
    weight, bias = torch.zeros(4, mixed, dtype=BF16).T, torch.zeros(mixed, dtype=BF16)
    conv_state = make_conv_state(rows, mixed, 4, BF16)
    ones, norm = torch.ones(128), torch.ones(inner, dtype=BF16)
    out = torch.zeros(num_rows, 128, 64, dtype=BF16)
    mamba2.mamba2_step(
        out, xbc, dt, gate, weight, bias, ones, ones, ones, norm, conv_state,
        rows.view, *rows.after, 0.0, 1e30, 1e-6,
    )  # fmt: skip


def convolve(channels: int, new_lens: list[int]) -> None:
    """Four taps over the channels of a state layer."""
    rows = make_state_rows((3, channels), BF16, new_lens, [7] * len(new_lens), "cpu")
    x = torch.zeros(sum(new_lens), channels, dtype=BF16)
    weight = torch.zeros(4, channels, dtype=BF16).T
    causal_conv.causal_conv1d(
        torch.zeros_like(x), x, weight, None, rows.view.transpose(1, 2), *rows.before, True
    )


def norm_gated(size: int, channels: int) -> None:
    """The norm behind a state layer."""
    x = torch.zeros(4, channels, dtype=BF16)
    gated_norm.gated_rms_norm(
        torch.zeros_like(x), x, x.clone(), torch.ones(size), 1e-6, size, False
    )


CASES: dict[str, Callable[[], None]] = {
    "delta rule, decode": partial(scan_deltas, DECODE),
    "delta rule, step": step_deltas,
    "delta rule, prompts": partial(scan_deltas, PROMPTS),
    "delta rule, one prompt": partial(scan_deltas, [300]),
    "delta rule, prompts, large heads": partial(scan_deltas, PROMPTS, size=256),
    "Mamba-2, decode": partial(scan_mamba, DECODE),
    "Mamba-2, step": partial(step_mamba, 1),
    "Mamba-2, step of many": partial(step_mamba, 2),
    "Mamba-2, prompts": partial(scan_mamba, PROMPTS),
    "Mamba-2, prompts, small states": partial(
        scan_mamba, PROMPTS, state=64, kept=BF16, is_plain=True
    ),
    "Mamba-2, prompts, large heads": partial(scan_mamba, PROMPTS, size=128, state=256),
    "convolution, decode": partial(convolve, 8192, DECODE),
    "convolution, prompts": partial(convolve, 8192, PROMPTS),
    "gated norm": partial(norm_gated, 128, 4096),
}

if __name__ == "__main__":
    sys.exit(main(CASES))
