"""The gated delta rule on a GPU, against its naive twin."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.utils.ops import FLOAT_DTYPES, poisoned, random_rows
from tests.utils.states import all_bytes, assert_close, make_conv_state, make_state_rows
from vllm._custom_ops.naive import state_space as naive

ROWS = {
    "decode": ([1, 1, 1], [0, 7, 1]),
    "some_without": ([0, 1, 2, 0], [5, 7, 0, 0]),
    "mixed": ([1, 1, 64, 0, 33], [3, 0, 0, 5, 16]),
    "prompt": ([63, 65, 1], [0, 2, 0]),
    "long": ([130], [0]),
}
SHAPES = {"even": (1, 2, 32, 64), "odd": (1, 2, 19, 37), "wide": (1, 1, 136, 48)}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
STATE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""After a step: a convolved number may be rounded the other way."""


def make_inputs(
    num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> tuple[Tensor, ...]:
    """Return q, k, v as views of one tensor."""
    key_heads, heads, key, value = shape
    keys = key_heads * key
    wide = random_rows(num_tokens, 2 * keys + heads * value, dtype=dtype, seed=1).to(device)
    q, k, v = wide.split((keys, keys, heads * value), -1)
    return q.unflatten(-1, (-1, key)), k.unflatten(-1, (-1, key)), v.unflatten(-1, (-1, value))


CASES = [
    *itertools.product(["even"], ROWS),
    ("odd", "decode"),
    ("odd", "mixed"),
    ("wide", "some_without"),
    ("wide", "mixed"),
]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("shape", "name"), CASES)
def test_equals_the_twin(device: str, shape: str, name: str, dtype: torch.dtype) -> None:
    check_rule(device, shape, name, dtype)


def test_wide_slices_equal_the_twin(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there are many rows."""
    from vllm._custom_ops.triton import delta_chunks

    monkeypatch.setattr(delta_chunks, "MANY_PROGRAMS", 1)
    check_rule(device, "even", "mixed", torch.bfloat16)


def check_rule(device: str, shape: str, name: str, dtype: torch.dtype) -> None:
    """Compare outputs and all bytes of the cache."""
    from vllm._custom_ops.triton import delta_rule as ops

    _, heads, key, value = SHAPES[shape]
    num_tokens = sum(ROWS[name][0])
    q, k, v = make_inputs(num_tokens, SHAPES[shape], dtype, device)
    g = -random_rows(num_tokens, heads, dtype=torch.float32, seed=2).abs().to(device)
    beta = random_rows(num_tokens, heads, dtype=torch.float32, seed=3).sigmoid().to(device)
    found = []
    for module in (ops, naive):
        rows = make_state_rows((heads, key, value), torch.float32, *ROWS[name], device)
        out = poisoned(v.shape, dtype).to(device)
        module.gated_delta_rule(out, q, k, v, g, beta, rows.view, *rows.before, key**-0.5, True)
        found.append((out, rows.memory))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_repeated_keys_are_exact(device: str, dtype: torch.dtype) -> None:
    """One token many times, no decay, full rate: powers of the triangle would overflow."""
    from vllm._custom_ops.triton import delta_rule as ops

    q, k, v = (t[:1].repeat(70, 1, 1) for t in make_inputs(1, (1, 1, 16, 16), dtype, device))
    v = v + random_rows(70, 1, 16, dtype=dtype, seed=9).to(device)
    g = torch.zeros(70, 1, device=device)
    beta = torch.ones(70, 1, device=device)
    found = []
    for module in (ops, naive):
        rows = make_state_rows((1, 16, 16), torch.float32, [70], [0], device)
        out = poisoned(v.shape, dtype).to(device)
        module.gated_delta_rule(out, q, k, v, g, beta, rows.view, *rows.before, 0.25, True)
        found.append((out, rows.memory))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected, 3 * TOLERANCE[dtype])  # a sum of 70 changes that cancel


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES.values(), (1, 1, 256, 128)])
def test_step_equals_the_twin(
    device: str, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Continued, new and padding rows and one without a token; small heads with their norm."""
    from vllm._custom_ops.triton import delta_rule as ops

    key_heads, heads, key, value = shape
    channels = 2 * key_heads * key + heads * value
    lengths, computed = [1, 1, 0, 1, 1], [4, 0, 6, -1, 1]
    qkv = random_rows(4, channels, dtype=dtype, seed=1).to(device)
    filters = random_rows(4, channels, dtype=dtype, seed=9).to(device).T
    wide = random_rows(4, heads * (value + 2), dtype=dtype, seed=5).to(device)
    gate, b, a = wide.split((heads * value, heads, heads), -1)
    gate = gate.unflatten(-1, (heads, value))
    a_log, dt_bias = (random_rows(heads, dtype=torch.float32, seed=s).to(device) for s in (6, 7))
    weight = random_rows(value, dtype=dtype, seed=8).to(device)
    found = []
    for module in (ops, naive):
        rows = make_state_rows((heads, key, value), torch.float32, lengths, computed, device)
        conv_state = make_conv_state(rows, channels, 4, dtype)
        out = poisoned(gate.shape, dtype).to(device)
        module.gated_delta_step(
            out, qkv, a, b, gate, filters, a_log, dt_bias, weight, conv_state, rows.view,
            *rows.after, key**-0.5, 1e-6,
        )  # fmt: skip
        found.append((out, rows.memory, all_bytes(conv_state)))
    assert_close(found[0][0], found[1][0], TOLERANCE[dtype])
    assert_close(found[0][1], found[1][1], STATE_TOLERANCE[dtype])
    torch.testing.assert_close(found[0][2], found[1][2], rtol=0, atol=0, equal_nan=True)
    assert not found[0][0][2].any()


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
def test_states_of_any_float_type(device: str, state_dtype: torch.dtype) -> None:
    """Prompts and single tokens; the arithmetic is that of float32."""
    from vllm._custom_ops.triton import delta_rule as ops

    _, heads, key, value = SHAPES["odd"]
    for lengths, computed in (([1, 70], [3, 5]), ([1, 1, 1], [0, 7, 1])):
        num_tokens = sum(lengths)
        q, k, v = make_inputs(num_tokens, SHAPES["odd"], torch.float32, device)
        g = -random_rows(num_tokens, heads, dtype=torch.float32, seed=2).abs().to(device)
        beta = random_rows(num_tokens, heads, dtype=torch.float32, seed=3).sigmoid().to(device)
        found = []
        for module in (ops, naive):
            rows = make_state_rows((heads, key, value), state_dtype, lengths, computed, device)
            out = poisoned(v.shape, torch.float32).to(device)
            module.gated_delta_rule(out, q, k, v, g, beta, rows.view, *rows.before, key**-0.5, True)
            found.append((out, rows.memory))
        assert_close(found[0][0], found[1][0], 1e-4)
        assert_close(found[0][1], found[1][1], 1e-2)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_gates_equal_the_twin(device: str, dtype: torch.dtype) -> None:
    from vllm._custom_ops.triton import delta_rule as ops

    wide = random_rows(9, 16, dtype=dtype, seed=1, scale=8.0)
    wide[0, 0], wide[0, 8], wide[1, 0] = 60.0, -90.0, -60.0
    a, b = wide.to(device)[:, :7], wide.to(device)[:, 8:15]
    a_log, dt_bias = (random_rows(7, dtype=torch.float32, seed=s).to(device) for s in (3, 4))
    made = [poisoned(a.shape, torch.float32).to(device) for _ in range(4)]
    ops.delta_rule_gates(made[0], made[1], a, b, a_log, dt_bias)
    naive.delta_rule_gates(made[2], made[3], a, b, a_log, dt_bias)
    torch.testing.assert_close(made[0], made[2], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(made[1], made[3], rtol=1e-5, atol=1e-7)
