"""Products that stream their weights against their twins: odd sizes, parts, what lies beside."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests._custom_ops.triton import gluon_stand_in
from tests.utils.ops import assert_near, poisoned, random_rows
from vllm._custom_ops.naive import linear as naive
from vllm._custom_ops.triton import (
    linear,
    linear_table,
    product,
    stream_hopper,
    stream_table,
)
from vllm._custom_ops.triton.stream_hopper import can_stream, stream_gated, stream_parts
from vllm._custom_ops.triton.stream_table import StreamTile

BF16 = torch.bfloat16
TILES = (
    StreamTile(wide=64, num_stages=3, block_k=128, min_share=1.0),
    StreamTile(wide=32, narrow=16, num_stages=5, block_k=64, min_share=1.0),
    StreamTile(wide=128, num_stages=2, block_k=64, min_share=1.0),
    StreamTile(wide=32, num_stages=2, block_k=256, min_share=1.0),
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a Hopper of few processors on a CPU; others are left out."""
    hosts = (linear, linear_table)
    if not gluon_stand_in.play_hopper(monkeypatch, (stream_hopper,), hosts=hosts, num_processors=4):
        return
    language = vars(gluon_stand_in.LANGUAGE) | {
        "exp": torch.exp,
        "erf": torch.erf,
        "static_assert": lambda holds: None,
    }
    monkeypatch.setattr(product, "tl", SimpleNamespace(**language))
    monkeypatch.setattr(stream_hopper, "activate", product.activate.fn)
    for name in ("await_inputs", "let_next_start"):
        monkeypatch.setattr(stream_hopper, name, lambda overlaps: None)


def make(num_rows: int, n: int, k: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return an input, in wider rows beside NaN, and a weight."""
    wide = torch.full((num_rows + 3, k + 16), torch.nan, dtype=dtype)
    wide[:num_rows, 8 : k + 8] = random_rows(num_rows, k, dtype=dtype, seed=1)
    weight = random_rows(n, k, dtype=dtype, seed=2, scale=k**-0.5)
    return wide.to(device)[:num_rows, 8 : k + 8], weight.to(device)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("num_rows", "n", "k", "num_parts"),
    [(64, 300, 640, 3), (1, 256, 192, 1), (5, 77, 200, 4), (33, 130, 64, 2)],
)
def test_parts_add_up(
    device: str,
    dtype: torch.dtype,
    tile: StreamTile,
    num_rows: int,
    n: int,
    k: int,
    num_parts: int,
) -> None:
    x, weight = make(num_rows, n, k, dtype, device)
    memory = torch.full((num_parts + 1, num_rows, n), torch.nan, device=device)
    assert can_stream(x, weight)
    stream_parts(memory[:num_parts], x, weight, tile)
    assert_near(memory[:num_parts].sum(0), x.float() @ weight.float().T)
    assert memory[num_parts].isnan().all()


@pytest.mark.parametrize("activation", linear.GATED_ACTIVATIONS)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("num_rows", "n", "k"), [(64, 300, 320), (3, 80, 200)])
def test_gated_equals_twin(
    device: str, activation: str, tile: StreamTile, num_rows: int, n: int, k: int
) -> None:
    x, weight = make(num_rows, 2 * n, k, BF16, device)
    out = poisoned((num_rows + 1, n + 8), BF16).to(device)
    expected = torch.empty(num_rows, n, dtype=BF16, device=device)
    stream_gated(out[:num_rows, :n], x, weight, activation, tile)
    naive.skinny_gated_linear(expected, x, weight, None, activation)
    # Roundings of gate, up and result may fall the other way.
    torch.testing.assert_close(out[:num_rows, :n], expected, rtol=3e-2, atol=1.5e-2)
    out[:num_rows, :n] = torch.nan
    assert out.isnan().all()


def test_a_row_has_the_same_bits_beside_others(device: str) -> None:
    x, weight = make(64, 256, 320, BF16, device)
    parts = torch.empty(2, 64, 256, device=device)
    stream_parts(parts, x, weight, TILES[0])
    alone = torch.empty(2, 1, 256, device=device)
    stream_parts(alone, x[7:8], weight, TILES[0])
    assert_near(alone, parts[:, 7:8])
    if device == "cuda":
        assert torch.equal(alone, parts[:, 7:8])


def test_ops_stream(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("launch_skinny", "launch_parts"):
        monkeypatch.setattr(linear, name, None)
    monkeypatch.setattr(linear, "choose_gated_tile", lambda *sizes: TILES[1])
    monkeypatch.setattr(linear, "is_streamed", lambda *sizes: True)
    x, weight = make(5, 300, 640, BF16, device)
    parts = poisoned((2, 5, 300), torch.float32).to(device)
    linear.skinny_linear_parts(parts, x, weight)
    assert_near(parts.sum(0), x.float() @ weight.float().T)
    out, expected = (poisoned((5, 150), torch.float32).to(device) for _ in range(2))
    linear.skinny_gated_linear(out, x, weight, None, "silu")
    naive.skinny_gated_linear(expected, x, weight, None, "silu")
    assert torch.equal(out, out.bfloat16().float())  # rounded all the same
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=1.5e-2)


def test_what_it_does_not_serve(device: str) -> None:
    x, weight = make(5, 64, 72, BF16, device)
    assert can_stream(x, weight)
    assert not can_stream(x.float(), weight.float())
    assert not can_stream(x[:0], weight)
    assert not can_stream(x[:, :68], weight[:, :68])
    assert not can_stream(x.contiguous().flatten()[4:-68].view(4, 72), weight)


@pytest.mark.parametrize("num_rows", [1, 16, 32, 64])
@pytest.mark.parametrize("n", [64, 2048, 2560, 3584, 4096, 4608, 6144, 18560])
@pytest.mark.parametrize("k", [64, 2048, 3584, 18944])
def test_every_part_of_k_has_work(num_rows: int, n: int, k: int) -> None:
    num_parts = stream_table.count_stream_parts(num_rows, n, k, 132)
    assert 0 <= num_parts <= stream_table.MAX_PARTS
    if num_parts:
        blocks = -(-k // stream_table.choose_tile(num_rows, n, k, 132).block_k)
        assert (num_parts - 1) * -(-blocks // num_parts) < blocks
