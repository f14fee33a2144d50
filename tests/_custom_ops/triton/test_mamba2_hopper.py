"""The Mamba-2 scan by Hopper's means against its naive twin: cut rows, short ones, NaN beside."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests._custom_ops.triton import gluon_stand_in
from tests.utils.ops import poisoned, random_rows
from tests.utils.states import StateRows, assert_close, make_state_rows
from vllm._custom_ops.naive import state_space as naive
from vllm._custom_ops.triton import mamba2, mamba2_hopper, mamba2_warps, state_hopper
from vllm._custom_ops.triton.mamba2_chunks import Scan

ROWS = {
    "mixed": ([1, 1, 64, 0, 33], [3, 0, 0, 5, 16]),
    "prompt": ([63, 65, 1], [0, 2, 0]),
    "long": ([260], [0]),
    "some_without": ([0, 64, 2, 0], [5, 7, 0, 0]),
    "pads": ([70, 64, 0, 200, 5], [3, -1, 4, 0, 0]),
}
Shape = tuple[int, int, int, int]  # heads, their size, groups, states
NEMOTRON: Shape = (4, 64, 2, 128)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a Hopper of few processors on a CPU; others are left out. Few heads are enough."""
    monkeypatch.setattr(mamba2_hopper, "MIN_WALKS", 1)
    gluon_stand_in.play_hopper(monkeypatch, (state_hopper, mamba2_warps, mamba2_hopper))


def make_given(
    device: str,
    shape: Shape,
    num_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_plain: bool = False,
) -> dict[str, Any]:
    """Return the arguments of a scan but rows and states.

    Args:
        is_plain: without D and bias, with limits of the time step.
    """
    heads, size, groups, state = shape
    inner, shared = heads * size, groups * state
    mixed = random_rows(num_tokens, inner + 2 * shared, dtype=dtype, seed=0).to(device)
    x, b, c = mixed.split((inner, shared, shared), -1)
    project = random_rows(num_tokens, inner + heads, dtype=dtype, seed=1).to(device)
    decay = -random_rows(heads, dtype=torch.float32, seed=2).exp()
    skip, bias = (random_rows(heads, dtype=torch.float32, seed=s).to(device) for s in (3, 4))
    return {
        "out": poisoned((num_tokens, heads, size), dtype).to(device),
        "x": x.unflatten(-1, (-1, size)),
        "dt": project[:, inner:],
        "a": decay.to(device),
        "b": b.unflatten(-1, (-1, state)),
        "c": c.unflatten(-1, (-1, state)),
        "skip": None if is_plain else skip,
        "dt_bias": None if is_plain else bias,
        "dt_min": 0.01,
        "dt_max": 1.5 if is_plain else float("inf"),
    }


def make_scan(given: dict[str, Any], rows: StateRows) -> Scan:
    """Return a scan of rows; its output is one of its own."""
    state_offsets, cu_query_lens, lens = rows.before
    mine = {**given, "out": given["out"].clone(), "state": rows.view}
    return Scan(**mine, state_offsets=state_offsets, cu_query_lens=cu_query_lens, lens=lens)


def run_op(module: Any, scan: Scan) -> None:
    """Call the op of a module."""
    module.mamba2_scan(*(getattr(scan, field.name) for field in fields(scan)))


def run_walk(scan: Scan) -> None:
    """Check that the kernel serves, and run it."""
    assert mamba2_hopper.can_walk(scan)
    mamba2_hopper.walk_chunks(scan)


CASES = [
    (NEMOTRON, "mixed", False),
    (NEMOTRON, "prompt", False),
    (NEMOTRON, "pads", True),
    ((3, 64, 1, 64), "long", True),
    ((2, 64, 2, 128), "some_without", True),
    ((4, 64, 1, 64), "pads", False),
]


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "name", "is_plain"), CASES)
def test_equals_the_twin(
    device: str, shape: Shape, name: str, is_plain: bool, kept: torch.dtype
) -> None:
    """What padding rows hold is NaN: the tile before them ends with it."""
    dtype = torch.float16 if kept == torch.float16 else torch.bfloat16
    lengths, computed = ROWS[name]
    given = make_given(device, shape, sum(lengths), dtype, is_plain=is_plain)
    if -1 in computed:
        row = computed.index(-1)
        first = sum(lengths[:row])
        for part in ("x", "dt", "b", "c"):
            given[part][first : first + lengths[row]] = torch.nan
    found = []
    for run in (run_walk, partial(run_op, naive)):
        rows = make_state_rows((shape[0], shape[1], shape[3]), kept, lengths, computed, device)
        scan = make_scan(given, rows)
        run(scan)
        found.append((scan.out, rows.memory))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected, 2e-2)


def test_padding_rows_keep_their_state(device: str) -> None:
    rows = make_state_rows((4, 64, 128), torch.float32, [64, 70], [-1, 0], device)
    padding = rows.view[int(rows.offsets[0])]
    padding.fill_(1.0)
    scan = make_scan(make_given(device, NEMOTRON, 134), rows)
    run_walk(scan)
    assert padding.eq(1.0).all()
    assert scan.out[:64].isnan().all()
    assert not scan.out[64:].isnan().any()


def test_prompts_go_there(device: str) -> None:
    """They may stand behind rows that are none of this op's."""
    rows = make_state_rows((4, 64, 128), torch.float32, [40, 30, 70, 129], [3, 4, 0, 64], device)
    given = make_given(device, NEMOTRON, 269)
    parts = {name: getattr(rows, name)[2:] for name in ("offsets", "cu_query_lens", "num_computed")}
    last, start = replace(rows, **parts), rows.memory.clone()
    found = []
    for run in (partial(run_op, mamba2), run_walk, partial(run_op, naive)):
        rows.memory.copy_(start)
        scan = make_scan(given, last)
        run(scan)
        found.append((scan.out, rows.memory.clone()))
    for actual, same, expected in zip(*found, strict=True):
        assert torch.equal(actual.nan_to_num(), same.nan_to_num())
        assert_close(actual, expected, 2e-2)
    assert found[0][0][:70].isnan().all()


def test_a_prompt_has_the_same_bits_where_chunks_are_not_cut(device: str) -> None:
    """As checkpoints of the prefix cache cut it, with states in float32."""
    given = make_given(device, NEMOTRON, 300)
    found = []
    for ends in ([300], [64, 256, 300]):
        rows = make_state_rows((4, 64, 128), torch.float32, [300], [0], device)
        scan, first = make_scan(given, rows), 0
        for end in ends:
            own = {name: getattr(scan, name)[first:end] for name in ("out", "x", "dt", "b", "c")}
            lens = torch.tensor([first], dtype=torch.int32, device=device)
            bounds = torch.tensor([0, end - first], dtype=torch.int32, device=device)
            run_walk(replace(scan, **own, lens=lens, cu_query_lens=bounds))
            first = end
        found.append((scan.out, rows.memory))
    for whole, cut in zip(*found, strict=True):
        assert torch.equal(whole.nan_to_num(), cut.nan_to_num())


def test_what_it_does_not_serve(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_state_rows((4, 64, 128), torch.float32, [70], [0], device)
    scan = make_scan(make_given(device, NEMOTRON, 70), rows)
    assert mamba2_hopper.can_walk(scan)
    assert not mamba2_hopper.can_walk(replace(scan, x=scan.x.float()))
    assert not mamba2_hopper.can_walk(replace(scan, x=scan.x[:, :, :32]))
    assert not mamba2_hopper.can_walk(replace(scan, b=scan.b[:, :, :96]))
    moved = torch.zeros(70 * 4 * 64 + 4, dtype=torch.bfloat16, device=device)[4:].view(70, 4, 64)
    assert not mamba2_hopper.can_walk(replace(scan, out=moved))
    monkeypatch.setattr(mamba2_hopper, "MIN_WALKS", 5)
    assert not mamba2_hopper.can_walk(scan)
