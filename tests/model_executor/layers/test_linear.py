"""Split linear layers: shards of all ranks joined are the whole; what cannot be split says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm.distributed.parallel_state import TensorParallel
from vllm.errors import ConfigError
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    Linear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.weight_place import Shard

DTYPE = torch.float32


def make_rank(rank: int, size: int) -> TensorParallel:
    """Return a rank that can split but not talk: no collective is called in these tests."""
    return TensorParallel(rank, size, None if size == 1 else object())  # type: ignore[arg-type]


def load(layer: Linear, field: str, shard: Shard, tensor: Tensor) -> None:
    place = layer.place(field, shard)
    assert place.shape == tuple(tensor.shape)
    place.write(tensor)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_columns_of_all_ranks_joined_are_the_whole(size: int) -> None:
    weight, bias, x = random(32, 24), random(32), random(5, 24)
    parts = []
    for rank in range(size):
        layer = ColumnParallelLinear(24, 32, bias=True, dtype=DTYPE, tp=make_rank(rank, size))
        load(layer, "weight", None, weight)
        load(layer, "bias", None, bias)
        parts.append(layer(x))
    torch.testing.assert_close(torch.cat(parts, dim=-1), x @ weight.T + bias)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_merged_columns_keep_their_order_on_every_rank(size: int) -> None:
    gate, up, x = random(16, 24), random(16, 24) + 1, random(5, 24)
    gates, ups = [], []
    for rank in range(size):
        layer = MergedColumnParallelLinear(
            24, {"gate": 16, "up": 16}, bias=False, dtype=DTYPE, tp=make_rank(rank, size)
        )
        load(layer, "weight", "up", up)
        load(layer, "weight", "gate", gate)
        one, other = layer(x).chunk(2, dim=-1)
        gates.append(one)
        ups.append(other)
    torch.testing.assert_close(torch.cat(gates, dim=-1), x @ gate.T)
    torch.testing.assert_close(torch.cat(ups, dim=-1), x @ up.T)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_of_all_ranks_added_are_the_whole(size: int) -> None:
    weight, bias, x = random(24, 32), random(24), random(5, 32)
    total = torch.zeros(5, 24)
    for rank, part in enumerate(x.chunk(size, dim=-1)):
        layer = RowParallelLinear(32, 24, bias=True, dtype=DTYPE, tp=make_rank(rank, size))
        load(layer, "weight", None, weight)
        load(layer, "bias", None, bias)
        total += layer.multiply(part, None)
    torch.testing.assert_close(total + bias, x @ weight.T + bias)


@pytest.mark.parametrize(
    ("size", "num_kv_heads", "owners"),
    [
        (1, 2, [[0, 1]]),
        (2, 2, [[0], [1]]),
        (2, 4, [[0, 1], [2, 3]]),
        (4, 2, [[0], [0], [1], [1]]),
        (4, 1, [[0], [0], [0], [0]]),
    ],
)
def test_kv_heads_are_split_or_copied(
    size: int, num_kv_heads: int, owners: list[list[int]]
) -> None:
    head_size, num_heads, x = 8, 8, random(3, 24)
    weights = {
        "q": random(num_heads * head_size, 24),
        "k": random(num_kv_heads * head_size, 24) + 1,
        "v": random(num_kv_heads * head_size, 24) + 2,
    }
    queries = []
    for rank in range(size):
        layer = QKVParallelLinear(
            24,
            head_size,
            num_heads,
            num_kv_heads,
            bias=False,
            dtype=DTYPE,
            tp=make_rank(rank, size),
        )
        for shard, weight in weights.items():
            load(layer, "weight", shard, weight)
        q, k, v = layer(x).split((layer.q_size, layer.kv_size, layer.kv_size), dim=-1)
        queries.append(q)
        for part, shard in ((k, "k"), (v, "v")):
            heads = (x @ weights[shard].T).unflatten(-1, (-1, head_size))
            torch.testing.assert_close(part, heads[:, owners[rank]].flatten(1))
        # Each query head finds the KV head that it has in the whole model.
        whole = [
            (rank * layer.num_heads + head) * num_kv_heads // num_heads
            for head in range(layer.num_heads)
        ]
        local = [head * layer.num_kv_heads // layer.num_heads for head in range(layer.num_heads)]
        assert [owners[rank][head] for head in local] == whole
    torch.testing.assert_close(torch.cat(queries, dim=-1), x @ weights["q"].T)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "text"),
    [
        (6, 2, 4, r"num_attention_heads \(6\) cannot be split over tensor_parallel_size=4"),
        (6, 3, 2, r"num_key_value_heads \(3\) cannot be split over tensor_parallel_size=2"),
        (12, 2, 3, r"num_key_value_heads \(2\) can be neither split nor copied"),
        (4, 3, 1, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
    ],
)
def test_heads_that_cannot_be_split_are_refused(
    num_heads: int, num_kv_heads: int, size: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        QKVParallelLinear(
            24, 8, num_heads, num_kv_heads, bias=False, dtype=DTYPE, tp=make_rank(0, size)
        )


def test_sizes_that_cannot_be_split_say_what_could() -> None:
    with pytest.raises(ConfigError, match=r"intermediate_size \(30\).*divides it: 1, 2, 3, 5"):
        RowParallelLinear(
            30, 8, bias=False, dtype=DTYPE, tp=make_rank(0, 4), what="intermediate_size"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_changes_no_result_and_frees_the_plain_weight(dtype: torch.dtype) -> None:
    layer = ReplicatedLinear(40, 50, bias=True, dtype=dtype)
    load(layer, "weight", None, random(50, 40))
    load(layer, "bias", None, random(50))
    x = random(7, 40).to(dtype)
    before = layer(x)
    layer.pack()
    assert layer.weight is None and layer.packed is not None
    tolerance = 1e-5 if dtype == torch.float32 else 6e-2
    torch.testing.assert_close(layer(x), before, rtol=tolerance, atol=tolerance)
    packed = layer.packed
    layer.pack()
    assert layer.packed is packed


def test_a_wide_result_is_rounded_as_a_narrow_one() -> None:
    layer = ReplicatedLinear(40, 64, bias=False, dtype=torch.bfloat16)
    load(layer, "weight", None, random(64, 40))
    x = random(7, 40).bfloat16()
    for _ in range(2):
        wide = layer.multiply(x, None, out_dtype=torch.float32)
        assert wide.dtype == torch.float32
        assert torch.equal(wide, layer.multiply(x, None).float())
        layer.pack()
