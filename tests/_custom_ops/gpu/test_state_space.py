"""State ops in the shapes of Qwen3-Next and Nemotron-H on a GPU, against float32 twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests._custom_ops.gpu.graphs import capture
from tests._custom_ops.gpu.tensors import NEEDS_GPU, draw, poisoned_like
from tests.utils.states import StateRows, all_bytes, assert_close, make_conv_state, make_state_rows
from vllm._custom_ops.naive import state_space as naive
from vllm._custom_ops.triton.device import has_warp_group_products

pytestmark = NEEDS_GPU

DTYPE = torch.bfloat16
TAPS = 4
TOLERANCE = 2e-2
STATE_TOLERANCE = 1e-2
"""After a step over bfloat16: a convolved number may be rounded the other way."""
ROWS = {
    "one": ([1], [5]),
    "decode": ([1] * 64, [0, 3] * 32),
    "mixed": ([1, 1, 700, 0, 64, 63, 65], [3, 9, 0, 5, 0, 16, 1]),
    "long": ([2000], [0]),
}
KEY_HEADS, HEADS, KEY, VALUE = 16, 32, 128, 128
MAMBA_HEADS, SIZE, GROUPS, STATE = 128, 64, 8, 128
DELTA_SHAPE = (HEADS, KEY, VALUE)
MAMBA_SHAPE = (MAMBA_HEADS, SIZE, STATE)

Run = Callable[[object, StateRows, Tensor, tuple[Tensor, ...]], None]


def compare(
    ops: object, run: Run, shape: tuple[int, ...], name: str, inputs: tuple[Tensor, ...], like: int
) -> None:
    """Run an op over bfloat16 and its twin over the same numbers in float32.

    Args:
        like: which of the inputs the output looks like.
    """
    found = []
    for module, given in ((ops, inputs), (naive, tuple(x.float() for x in inputs))):
        rows = make_state_rows(shape, torch.float32, *ROWS[name], "cuda")
        out = poisoned_like(given[like])
        run(module, rows, out, given)
        found.append((out, rows.memory))
    assert_close(found[0][0], found[1][0], TOLERANCE)
    assert_close(found[0][1], found[1][1], TOLERANCE)


def make_delta_inputs(num_tokens: int) -> tuple[Tensor, ...]:
    """Return q, k, v and the raw gates a and b."""
    wide = draw(num_tokens, 2 * KEY_HEADS * KEY + HEADS * VALUE, dtype=DTYPE, seed=1)
    q, k, v = wide.split((KEY_HEADS * KEY, KEY_HEADS * KEY, HEADS * VALUE), -1)
    a, b = draw(num_tokens, 2 * HEADS, dtype=DTYPE, seed=2).chunk(2, -1)
    q, k, v = (t.unflatten(-1, (-1, KEY)) for t in (q, k, v))
    return q, k, v, a, b


def make_delta_step(num_tokens: int) -> tuple[Tensor, ...]:
    """Return qkv, a, b and the output gate."""
    channels = 2 * KEY_HEADS * KEY + HEADS * VALUE
    wide = draw(num_tokens, channels + HEADS * (VALUE + 2), dtype=DTYPE, seed=1)
    qkv, gate, a, b = wide.split((channels, HEADS * VALUE, HEADS, HEADS), -1)
    return qkv, a, b, gate.unflatten(-1, (-1, VALUE))


def make_head_numbers(num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return A_log, dt_bias and D."""
    a_log, dt_bias, skip = (draw(num_heads, dtype=torch.float32, seed=s) for s in (3, 4, 5))
    return a_log, dt_bias, skip


@pytest.mark.parametrize("name", ROWS)
def test_delta_rule(name: str) -> None:
    from vllm._custom_ops.triton import delta_rule as ops

    a_log, dt_bias, _ = make_head_numbers(HEADS)

    def run(module: object, rows: StateRows, out: Tensor, given: tuple[Tensor, ...]) -> None:
        q, k, v, a, b = given
        g, beta = (torch.empty(a.shape, device="cuda") for _ in range(2))
        module.delta_rule_gates(g, beta, a, b, a_log, dt_bias)  # type: ignore[attr-defined]
        module.gated_delta_rule(  # type: ignore[attr-defined]
            out, q, k, v, g, beta, rows.view, *rows.before, KEY**-0.5, True
        )

    compare(ops, run, DELTA_SHAPE, name, make_delta_inputs(sum(ROWS[name][0])), like=2)


def run_separate_ops(
    out: Tensor,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    gate: Tensor,
    filters: Tensor,
    numbers: tuple[Tensor, Tensor, Tensor],
    states: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Do what `gated_delta_step` does; rows as the ops take them that count tokens before."""
    from vllm._custom_ops.triton import causal_conv, delta_rule, gated_norm

    mixed = torch.empty_like(qkv)
    causal_conv.causal_conv1d(mixed, qkv, filters, None, states[0], *rows, True)
    q, k, v = mixed.split((KEY_HEADS * KEY, KEY_HEADS * KEY, HEADS * VALUE), -1)
    q, k, v = (t.unflatten(-1, (-1, KEY)) for t in (q, k, v))
    g, beta = (torch.empty(a.shape, device="cuda") for _ in range(2))
    delta_rule.delta_rule_gates(g, beta, a, b, *numbers[:2])
    delta_rule.gated_delta_rule(out, q, k, v, g, beta, states[1], *rows, KEY**-0.5, True)
    flat = out.flatten(1)
    gated_norm.gated_rms_norm(flat, flat, gate.flatten(1), numbers[2], 1e-6, VALUE, False)


@pytest.mark.parametrize("name", ["one", "decode"])
def test_delta_step(name: str) -> None:
    """Equal to the separate ops, whose twins are above; where nearly nothing is read of a state,
    the norm enlarges what the convolution rounds, so that float32 would tell nothing."""
    from vllm._custom_ops.triton import delta_rule as ops

    a_log, dt_bias, _ = make_head_numbers(HEADS)
    numbers = (a_log, dt_bias, draw(VALUE, dtype=DTYPE, seed=6))
    given = make_delta_step(sum(ROWS[name][0]))
    filters = draw(TAPS, given[0].shape[1], dtype=DTYPE, seed=7).T
    found = []
    for is_separate in (False, True):
        rows = make_state_rows(DELTA_SHAPE, torch.float32, *ROWS[name], "cuda")
        conv_state = make_conv_state(rows, given[0].shape[1], TAPS, DTYPE)
        out, states = poisoned_like(given[3]), (conv_state, rows.view)
        if is_separate:
            run_separate_ops(out, *given, filters, numbers, states, rows.before)
        else:
            more = (*states, *rows.after, KEY**-0.5, 1e-6)
            ops.gated_delta_step(out, *given, filters, *numbers, *more)
        found.append((out, rows.memory, all_bytes(conv_state)))
    assert_close(found[0][0], found[1][0], TOLERANCE)
    assert_close(found[0][1], found[1][1], 1e-4)
    torch.testing.assert_close(found[0][2], found[1][2], rtol=0, atol=0, equal_nan=True)


def make_mamba_inputs(num_tokens: int) -> tuple[Tensor, ...]:
    """Return x, dt, B, C."""
    inner, shared = MAMBA_HEADS * SIZE, GROUPS * STATE
    wide = draw(num_tokens, inner + 2 * shared + MAMBA_HEADS, dtype=DTYPE, seed=1)
    x, b, c, dt = wide.split((inner, shared, shared, MAMBA_HEADS), -1)
    b, c = (t.unflatten(-1, (-1, STATE)) for t in (b, c))
    return x.unflatten(-1, (-1, SIZE)), dt, b, c


@pytest.mark.parametrize("name", ROWS)
def test_mamba_scan(name: str) -> None:
    from vllm._custom_ops.triton import mamba2 as ops

    a_log, dt_bias, skip = make_head_numbers(MAMBA_HEADS)

    def run(module: object, rows: StateRows, out: Tensor, given: tuple[Tensor, ...]) -> None:
        x, dt, b, c = given
        module.mamba2_scan(  # type: ignore[attr-defined]
            out, x, dt, -a_log.exp(), b, c, skip, dt_bias, rows.view, *rows.before,
            0.0, float("inf"),
        )  # fmt: skip

    compare(ops, run, MAMBA_SHAPE, name, make_mamba_inputs(sum(ROWS[name][0])), like=0)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mixed", "long"])
def test_prompts_on_hopper_have_the_bits_of_the_others(
    name: str, kept: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ops by Hopper's means and by the kernels of other GPUs; three runs of each alike."""
    from vllm._custom_ops.triton import delta_chunks, delta_rule, mamba2

    if not has_warp_group_products(torch.device("cuda", 0)):
        pytest.skip("no sm_90")
    num_tokens = sum(ROWS[name][0])
    a_log, dt_bias, skip = make_head_numbers(MAMBA_HEADS)
    x, dt, b, c = make_mamba_inputs(num_tokens)
    q, k, v, _, _ = make_delta_inputs(num_tokens)
    g = -draw(num_tokens, HEADS, dtype=torch.float32, seed=2).abs()
    beta = draw(num_tokens, HEADS, dtype=torch.float32, seed=3).sigmoid()
    found = []
    for turn in range(4):
        if turn == 3:
            monkeypatch.setattr(mamba2, "can_walk", lambda *args: False)
            monkeypatch.setattr(delta_chunks, "can_pass", lambda *args: False)
        outs = poisoned_like(x), poisoned_like(v)
        states = [make_state_rows(s, kept, *ROWS[name], "cuda") for s in (MAMBA_SHAPE, DELTA_SHAPE)]
        mamba2.mamba2_scan(
            outs[0], x, dt, -a_log.exp(), b, c, skip, dt_bias, states[0].view, *states[0].before,
            0.0, float("inf"),
        )  # fmt: skip
        delta_rule.gated_delta_rule(
            outs[1], q, k, v, g, beta, states[1].view, *states[1].before, KEY**-0.5, True
        )
        found.append((*outs, *(rows.memory for rows in states)))
    for others in found[1:]:
        for actual, expected in zip(others, found[0], strict=True):
            assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("name", ["one", "decode"])
def test_mamba_step(name: str) -> None:
    from vllm._custom_ops.triton import mamba2 as ops

    a_log, dt_bias, skip = make_head_numbers(MAMBA_HEADS)
    num_tokens, inner = sum(ROWS[name][0]), MAMBA_HEADS * SIZE
    channels = inner + 2 * GROUPS * STATE
    wide = draw(num_tokens, inner + channels + MAMBA_HEADS, dtype=DTYPE, seed=1)
    gate, xbc, dt = wide.split((inner, channels, MAMBA_HEADS), -1)
    filters, bias = (draw(n, channels, dtype=DTYPE, seed=7).T for n in (TAPS, 1))
    weight = draw(inner, dtype=DTYPE, seed=8)

    def run(module: object, rows: StateRows, out: Tensor, given: tuple[Tensor, ...]) -> None:
        gate, xbc, dt = given
        conv = (t.to(out.dtype) for t in (filters, bias[:, 0]))
        conv_state = make_conv_state(rows, channels, TAPS, out.dtype)
        module.mamba2_step(  # type: ignore[attr-defined]
            out.unflatten(-1, (-1, SIZE)), xbc, dt, gate, *conv, a_log, skip, dt_bias,
            weight.to(out.dtype), conv_state, rows.view, *rows.after, 0.0, float("inf"), 1e-6,
        )  # fmt: skip

    compare(ops, run, MAMBA_SHAPE, name, (gate, xbc, dt), like=0)


@pytest.mark.parametrize("name", ROWS)
def test_convolution(name: str) -> None:
    """States hold inputs, so that they must be equal to the bit."""
    from vllm._custom_ops.triton import causal_conv as ops

    channels, taps = 8192, 4
    x = draw(sum(ROWS[name][0]), channels + 64, dtype=DTYPE, seed=1)[:, :channels]
    weight = draw(taps, channels, dtype=DTYPE, seed=2).T
    found = []
    for module in (ops, naive):
        rows = make_state_rows((taps - 1, channels), DTYPE, *ROWS[name], "cuda")
        out = poisoned_like(x)
        state = rows.view.transpose(1, 2)
        module.causal_conv1d(out, x, weight, None, state, *rows.before, True)
        found.append((out, rows.memory))
    assert_close(found[0][0], found[1][0], TOLERANCE)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("channels", "gate_first"), [(128, False), (1024, True), (8192, True)])
def test_gated_norm(channels: int, gate_first: bool) -> None:
    from vllm._custom_ops.triton import gated_norm as ops

    x, gate = (draw(70, 8192, dtype=DTYPE, seed=s) for s in (1, 2))
    weight = draw(8192 if gate_first else channels, dtype=DTYPE, seed=3)
    actual, expected = poisoned_like(x), poisoned_like(x)
    ops.gated_rms_norm(actual, x, gate, weight, 1e-6, channels, gate_first)
    naive.gated_rms_norm(expected, x, gate, weight, 1e-6, channels, gate_first)
    assert_close(actual, expected, TOLERANCE)


def test_replays_follow_the_rows() -> None:
    """One graph of four rows; between replays rows move, grow and become padding."""
    from vllm._custom_ops.triton import delta_rule as ops

    a_log, dt_bias, _ = make_head_numbers(HEADS)
    weight = draw(VALUE, dtype=DTYPE, seed=6)
    given = make_delta_step(4)
    channels = given[0].shape[1]
    filters = draw(TAPS, channels, dtype=DTYPE, seed=7).T
    out = poisoned_like(given[3])
    rows = make_state_rows(DELTA_SHAPE, torch.float32, [1] * 4, [0, 3, 5, -1], "cuda")

    def run(module: object, out: Tensor, conv_state: Tensor, view: Tensor) -> None:
        module.gated_delta_step(  # type: ignore[attr-defined]
            out, *given, filters, a_log, dt_bias, weight, conv_state, view, *rows.after,
            KEY**-0.5, 1e-6,
        )  # fmt: skip

    start = rows.memory.clone()
    conv_state = make_conv_state(rows, channels, TAPS, DTYPE)
    conv_start = all_bytes(conv_state).nan_to_num(0.5)
    graph = capture(lambda: run(ops, out, conv_state, rows.view))
    for seq_lens, order in (([1, 4, 6, 0], [0, 1, 2, 3]), ([5, 0, 1, 2], [2, 1, 0, 3])):
        rows.memory.copy_(start.nan_to_num(0.5))
        all_bytes(conv_state).copy_(conv_start)
        rows.seq_lens.copy_(torch.tensor(seq_lens))
        rows.offsets.copy_(rows.offsets[torch.tensor(order).cuda()])
        expected_memory = rows.memory.clone()
        graph.replay()
        expected = poisoned_like(out)
        view = expected_memory.as_strided(
            rows.view.shape, rows.view.stride(), rows.view.storage_offset()
        )
        expected_conv = conv_start.clone().as_strided(conv_state.shape, conv_state.stride())
        run(naive, expected, expected_conv, view)
        assert_close(out, expected, TOLERANCE)
        assert_close(rows.memory, expected_memory, STATE_TOLERANCE)
        assert torch.equal(all_bytes(conv_state), all_bytes(expected_conv))
