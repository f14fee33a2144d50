"""The gated delta rule with a pass by Hopper's means, against its naive twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests._custom_ops.triton import gluon_stand_in
from tests._custom_ops.triton.test_delta_rule import make_inputs
from tests.utils.ops import poisoned, random_rows
from tests.utils.states import StateRows, assert_close, make_state_rows
from vllm._custom_ops.naive import state_space as naive
from vllm._custom_ops.triton import (
    delta_chunks,
    delta_hopper,
    delta_rule,
    delta_warps,
    state_hopper,
)

ROWS = {
    "mixed": ([1, 1, 64, 0, 33], [3, 0, 0, 5, 16]),
    "prompt": ([63, 65, 1], [0, 2, 0]),
    "long": ([260], [0]),
    "pads": ([70, 64, 0, 200, 5], [3, -1, 4, 0, 0]),
}
SIZE = 128
TOLERANCE = 2e-2


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a Hopper of few processors on a CPU; others are left out."""
    gluon_stand_in.play_hopper(monkeypatch, (state_hopper, delta_warps, delta_hopper))


@pytest.fixture(autouse=True)
def no_other_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the kernel of other GPUs is launched."""
    monkeypatch.setattr(delta_chunks, "_delta_pass_kernel", None)


def make_given(
    device: str, key_heads: int, num_tokens: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    """Return q, k, v, g and beta of two heads."""
    qkv = make_inputs(num_tokens, (key_heads, 2, SIZE, SIZE), dtype, device)
    g = -random_rows(num_tokens, 2, dtype=torch.float32, seed=2).abs().to(device)
    beta = random_rows(num_tokens, 2, dtype=torch.float32, seed=3).sigmoid().to(device)
    return *qkv, g, beta


def run(
    module: Any, given: tuple[Tensor, ...], rows: StateRows, *, l2norm: bool = True
) -> tuple[Tensor, Tensor]:
    """Return outputs, NaN where none were written, and all bytes of the states."""
    out = poisoned(given[2].shape, given[2].dtype).to(given[2].device)
    module.gated_delta_rule(out, *given, rows.view, *rows.before, SIZE**-0.5, l2norm)
    return out, rows.memory.clone()


@pytest.mark.parametrize("columns", delta_hopper._COLUMNS)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("key_heads", "name"), [(1, "mixed"), (2, "prompt"), (1, "pads")])
def test_equals_the_twin(
    device: str,
    key_heads: int,
    name: str,
    kept: torch.dtype,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What padding rows hold is NaN: the tile before them ends with it."""
    monkeypatch.setattr(delta_hopper, "_COLUMNS", (columns, columns))
    lengths, computed = ROWS[name]
    dtype = torch.float16 if kept == torch.float16 else torch.bfloat16
    given = make_given(device, key_heads, sum(lengths), dtype)
    if -1 in computed:
        row = computed.index(-1)
        first = sum(lengths[:row])
        for part in given:
            part[first : first + lengths[row]] = torch.nan
    found = []
    for module in (delta_rule, naive):
        rows = make_state_rows((2, SIZE, SIZE), kept, lengths, computed, device)
        found.append(run(module, given, rows))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected, TOLERANCE)


def test_a_large_state_is_read_exactly(device: str) -> None:
    """What queries see of it is less than a step of bfloat16: it is the same for all keys else."""
    lengths, computed = [60, 64], [1, 70]
    q, k, v, g, beta = make_given(device, 1, sum(lengths))
    q[:, :, 1::2] = -q[:, :, ::2]
    given = (q, k, v, g * 0.01, beta * 0.0)
    found = []
    for module in (delta_rule, naive):
        rows = make_state_rows((2, SIZE, SIZE), torch.float32, lengths, computed, device)
        rows.memory.mul_(0.1).add_(100.0)
        found.append(run(module, given, rows))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected, TOLERANCE)


def test_padding_rows_keep_their_state(device: str) -> None:
    rows = make_state_rows((2, SIZE, SIZE), torch.float32, [64, 70], [-1, 0], device)
    padding = rows.view[int(rows.offsets[0])]
    padding.fill_(1.0)
    out, _ = run(delta_rule, make_given(device, 1, 134), rows)
    assert padding.eq(1.0).all()
    assert out[:64].isnan().all()
    assert not out[64:].isnan().any()


def test_rows_behind_others(device: str) -> None:
    """Rows may stand before them that are none of this op's."""
    lengths = [40, 30, 70, 129]
    rows = make_state_rows((2, SIZE, SIZE), torch.float32, lengths, [3, 4, 0, 64], device)
    given = make_given(device, 1, sum(lengths))
    parts = {name: getattr(rows, name)[2:] for name in ("offsets", "cu_query_lens", "num_computed")}
    last, start = replace(rows, **parts), rows.memory.clone()
    found = []
    for module in (delta_rule, naive):
        rows.memory.copy_(start)
        found.append(run(module, given, last))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected, TOLERANCE)
    assert found[0][0][:70].isnan().all()


def test_a_state_has_the_same_bits_where_chunks_are_not_cut(device: str) -> None:
    """As checkpoints of the prefix cache cut a prompt, with states in float32."""
    given = make_given(device, 1, 300)
    found = []
    for ends in ([300], [64, 256, 300]):
        rows, first, outs = (
            make_state_rows((2, SIZE, SIZE), torch.float32, [300], [0], device),
            0,
            [],
        )
        for end in ends:
            lens = torch.tensor([first], dtype=torch.int32, device=device)
            bounds = torch.tensor([0, end - first], dtype=torch.int32, device=device)
            part = replace(rows, num_computed=lens, cu_query_lens=bounds)
            outs.append(run(delta_rule, tuple(x[first:end] for x in given), part)[0])
            first = end
        found.append((torch.cat(outs), rows.memory))
    assert_close(found[1][0], found[0][0], TOLERANCE)
    assert torch.equal(found[1][1].nan_to_num(), found[0][1].nan_to_num())


def test_what_it_does_not_serve(device: str) -> None:
    q, k, v, *_ = make_given(device, 1, 70)
    assert delta_hopper.can_pass(v, q, k)
    assert not delta_hopper.can_pass(v.float(), q.float(), k.float())
    assert not delta_hopper.can_pass(v[:, :, :64], q, k)
    assert not delta_hopper.can_pass(v, q[:, :, :64], k[:, :, :64])
    assert not delta_hopper.can_pass(v, q.flatten()[4:-124].view(-1, 1, SIZE), k)
