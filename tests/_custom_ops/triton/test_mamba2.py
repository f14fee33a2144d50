"""The Mamba-2 scan on a GPU, against its naive twin."""

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
SHAPES = {"even": (2, 32, 1, 64), "odd": (3, 21, 1, 19), "deep": (2, 64, 2, 136)}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
STATE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""After a step: a convolved number may be rounded the other way."""


def make_inputs(
    num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> tuple[Tensor, ...]:
    """Return x, dt, B, C as views of one tensor."""
    heads, size, groups, state = shape
    inner, shared = heads * size, groups * state
    wide = random_rows(num_tokens, inner + 2 * shared + heads, dtype=dtype, seed=1).to(device)
    x, b, c, dt = wide.split((inner, shared, shared, heads), -1)
    b, c = (t.unflatten(-1, (-1, state)) for t in (b, c))
    return x.unflatten(-1, (-1, size)), dt, b, c


CASES = [
    *itertools.product(["even"], ROWS),
    ("odd", "decode"),
    ("odd", "mixed"),
    ("deep", "some_without"),
    ("deep", "mixed"),
]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("shape", "name"), CASES)
def test_equals_the_twin(device: str, shape: str, name: str, dtype: torch.dtype) -> None:
    from vllm._custom_ops.triton import mamba2 as ops

    heads, size, _, state = SHAPES[shape]
    x, dt, b, c = make_inputs(sum(ROWS[name][0]), SHAPES[shape], dtype, device)
    decay = -random_rows(heads, dtype=torch.float32, seed=2).exp().to(device)
    skip, bias = (random_rows(heads, dtype=torch.float32, seed=s).to(device) for s in (3, 4))
    plain = shape == "odd"
    found = []
    for module in (ops, naive):
        rows = make_state_rows((heads, size, state), torch.float32, *ROWS[name], device)
        out = poisoned(x.shape, dtype).to(device)
        module.mamba2_scan(
            out, x, dt, decay, b, c, None if plain else skip, None if plain else bias,
            rows.view, *rows.before, 0.01, 1.5 if plain else float("inf"),
        )  # fmt: skip
        found.append((out, rows.memory))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES.values(), (1, 128, 1, 256)])
@pytest.mark.parametrize("few_heads", [128, 0])
def test_step_equals_the_twin(
    device: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    few_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Continued, new and padding rows and one without a token; with a norm and without."""
    from vllm._custom_ops.triton import mamba2 as ops
    from vllm._custom_ops.triton import mamba2_step

    monkeypatch.setattr(mamba2_step, "FEW_HEADS", few_heads)
    lengths, computed = [1, 1, 0, 1, 1], [4, 0, 6, -1, 1]
    for has_norm, taps in ((True, 4), (False, 2)):
        given = make_step_inputs(4, shape, dtype, device, taps=taps, has_norm=has_norm)
        found = []
        for module in (ops, naive):
            rows = make_state_rows(
                (shape[0], shape[1], shape[3]), torch.float32, lengths, computed, device
            )
            conv_state = make_conv_state(rows, given[0].shape[1], taps, dtype)
            out = poisoned((4, *shape[:2]), dtype).to(device)
            module.mamba2_step(out, *given, conv_state, rows.view, *rows.after, 0.001, 100.0, 1e-5)
            found.append((out, rows.memory, all_bytes(conv_state)))
        assert_close(found[0][0], found[1][0], TOLERANCE[dtype])
        assert_close(found[0][1], found[1][1], STATE_TOLERANCE[dtype])
        torch.testing.assert_close(found[0][2], found[1][2], rtol=0, atol=0, equal_nan=True)
        assert not found[0][0][2].any()


def make_step_inputs(
    num_tokens: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    *,
    taps: int = 4,
    has_norm: bool = True,
) -> tuple[Tensor | None, ...]:
    """Return what the step op takes between the output and the states."""
    heads, size, groups, state = shape
    inner, mixed = heads * size, heads * size + 2 * groups * state
    wide = random_rows(num_tokens, inner + mixed + heads, dtype=dtype, seed=1).to(device)
    gate, xbc, dt = wide.split((inner, mixed, heads), -1)
    weight = random_rows(taps, mixed, dtype=dtype, seed=7).to(device).T
    bias = random_rows(mixed, dtype=dtype, seed=8).to(device)
    norm = random_rows(inner, dtype=dtype, seed=9).to(device)
    numbers = (random_rows(heads, dtype=torch.float32, seed=s).to(device) for s in (2, 3, 4))
    if not has_norm:
        return xbc, dt, None, weight, None, *numbers, None
    return xbc, dt, gate, weight, bias, *numbers, norm


def test_many_rows_are_taken_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the bits that they get together."""
    from vllm._custom_ops.triton import mamba2 as ops
    from vllm._custom_ops.triton import mamba2_chunks as chunks

    heads, size, _, state = SHAPES["even"]
    x, dt, b, c = make_inputs(sum(ROWS["mixed"][0]), SHAPES["even"], torch.bfloat16, device)
    decay = -random_rows(heads, dtype=torch.float32, seed=2).exp().to(device)
    found = []
    runs: list[int] = []
    run_rows = chunks._run_rows

    def count_rows(scan: chunks.Scan, chunk: int) -> None:
        runs.append(len(scan.lens))
        run_rows(scan, chunk)

    monkeypatch.setattr(chunks, "_run_rows", count_rows)
    for num_bytes in (1 << 30, 0):
        monkeypatch.setattr(chunks, "SCRATCH_BYTES", num_bytes)
        rows = make_state_rows((heads, size, state), torch.float32, *ROWS["mixed"], device)
        out = poisoned(x.shape, x.dtype).to(device)
        ops.mamba2_scan(out, x, dt, decay, b, c, None, None, rows.view, *rows.before, 0.0, 9.0)
        found.append((out, rows.memory))
    assert runs == [5, 1, 1, 1, 1, 1]
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_states_of_16_bits(device: str, name: str, kept: torch.dtype) -> None:
    """Rounded once a step, after the arithmetic: as close to the twin as one step of theirs."""
    from vllm._custom_ops.triton import mamba2 as ops

    heads, size, _, state = SHAPES["even"]
    num_tokens = sum(ROWS[name][0])
    x, dt, b, c = make_inputs(num_tokens, SHAPES["even"], torch.float32, device)
    given = make_step_inputs(num_tokens, SHAPES["even"], torch.float32, device)
    a_log, skip, bias = (
        random_rows(heads, dtype=torch.float32, seed=s).to(device) for s in (2, 3, 4)
    )
    limits = (0.001, 100.0)
    found = []
    for module in (ops, naive):
        rows = make_state_rows((heads, size, state), kept, *ROWS[name], device)
        out = poisoned(x.shape, x.dtype).to(device)
        if name == "decode":
            conv_state = make_conv_state(rows, given[0].shape[1], 4, x.dtype)
            states = (conv_state, rows.view)
            module.mamba2_step(out, *given, *states, *rows.after, *limits, 1e-5)
        else:
            module.mamba2_scan(
                out, x, dt, -a_log.exp(), b, c, skip, bias, rows.view, *rows.before, *limits
            )
        found.append((out, rows.memory))
    assert_close(found[0][0], found[1][0], 1e-4)
    assert_close(found[0][1], found[1][1], torch.finfo(kept).eps)
