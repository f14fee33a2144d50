"""The causal convolution on a GPU, against its naive twin."""

from __future__ import annotations

import pytest
import torch

from tests.utils.ops import FLOAT_DTYPES, poisoned, random_rows
from tests.utils.states import StateRows, assert_close, make_state_rows
from vllm._custom_ops.naive import state_space as naive

ROWS = {
    "decode": ([1, 1, 1, 1], [0, 7, 0, 1]),
    "some_without": ([1, 0, 1, 0], [5, 7, 0, 0]),
    "mixed": ([1, 1, 17, 0, 2], [3, 0, 0, 5, 9]),
    "prompt": ([1, 16, 33], [0, 0, 5]),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.4e-2}
"""Three steps of bfloat16: the interpreter truncates where a GPU rounds."""


def make_rows(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> StateRows:
    return make_state_rows(shape, dtype, *ROWS[name], device)


CASES = [
    *((37, 4, name) for name in ROWS),
    (600, 3, "decode"),
    (600, 3, "mixed"),
    (16, 8, "some_without"),
    (16, 8, "mixed"),
    (5, 2, "decode"),
]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("channels", "taps", "name"), CASES)
def test_equals_the_twin(
    device: str, channels: int, taps: int, name: str, dtype: torch.dtype
) -> None:
    from vllm._custom_ops.triton import causal_conv as ops

    num_tokens = sum(ROWS[name][0])
    wide = random_rows(num_tokens, channels + 5, dtype=dtype, seed=1).to(device)
    x = wide[:, 2 : 2 + channels]
    weight = random_rows(taps, channels, dtype=dtype, seed=2).to(device).T
    bias = random_rows(channels, dtype=dtype, seed=4).to(device) if taps % 2 else None
    found = []
    for module in (ops, naive):
        rows = make_rows(name, (taps - 1, channels), dtype, device)
        out = poisoned(x.shape, dtype).to(device)
        module.causal_conv1d(
            out, x, weight, bias, rows.view.transpose(1, 2), *rows.before, taps != 3
        )
        found.append((out, rows.memory))
    assert_close(found[0][0], found[1][0], TOLERANCE[dtype])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_step_equals_the_twin(device: str, is_gated: bool, dtype: torch.dtype) -> None:
    """Continued, new and padding rows; the gates stand beside the inputs."""
    from vllm._custom_ops.triton import causal_conv as ops

    channels, taps, lengths, computed = 40, 3, [1, 1, 1, 1], [4, 0, -1, 1]
    wide = random_rows(4, 3 * channels, dtype=dtype, seed=1).to(device)
    gate_in, gate_out, x = wide.chunk(3, -1)
    weight = random_rows(taps, channels, dtype=dtype, seed=2).to(device).T
    found = []
    for module in (ops, naive):
        rows = make_state_rows((taps - 1, channels), dtype, lengths, computed, device)
        out = poisoned(x.shape, dtype).to(device)
        gates = (gate_in, gate_out) if is_gated else (None, None)
        module.causal_conv1d_step(
            out, x, *gates, weight, None, rows.view.transpose(1, 2), *rows.after, not is_gated
        )
        found.append((out, rows.memory))
    assert_close(found[0][0], found[1][0], TOLERANCE[dtype])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0, equal_nan=True)
    assert not found[0][0][2].any()
