"""Fused decoder layers: the bits of the single ops, near the twins, however a row is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.utils.ops import FLOAT_DTYPES, random_rows
from tests.utils.paged import PagedCache, cumulative, make_paged_cache
from vllm._custom_ops import activation, attention, cache, linear, norm, rope
from vllm._custom_ops.decoder import DecoderLayer, DecoderStack, PackedLinear, decoder_layers
from vllm._custom_ops.naive.decoder import OpFamilies, compose_decoder_layers
from vllm._custom_ops.naive.decoder import decoder_layers as naive_decoder_layers
from vllm.errors import ShapeError

DOORS = OpFamilies(
    activation=activation, attention=attention, cache=cache, linear=linear, norm=norm, rope=rope
)
NUM_POSITIONS = 700
EPSILON = 1e-5


class Numbers:
    """Random weights, each call another."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.count = 0

    def draw(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return normal numbers."""
        self.count += 1
        return random_rows(*shape, dtype=dtype or self.dtype, seed=self.count, scale=scale)

    def linear(self, n: int, k: int, *, bias: bool = False) -> PackedLinear:
        """Return a packed weight that keeps the size of its inputs."""
        packed = linear.pack_linear_weight(self.draw(n, k, scale=k**-0.5))
        return PackedLinear(packed=packed, bias=self.draw(n, scale=0.1) if bias else None)

    def norm(self, n: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return norm weights around 1."""
        return (1 + self.draw(n, scale=0.1)).to(dtype or self.dtype)


def make_layer(
    numbers: Numbers,
    *,
    hidden: int = 96,
    heads: int = 6,
    kv_heads: int = 2,
    head_size: int = 32,
    inner: int = 128,
    bias: bool = False,
    qk_norm: bool = False,
    post_norms: bool = False,
    norm_dtype: torch.dtype | None = None,
    **more: Any,
) -> DecoderLayer:
    """Return a layer of random weights."""

    def norms(n: int, wanted: bool = True) -> Tensor | None:
        return numbers.norm(n, norm_dtype) if wanted else None

    fields: dict[str, Any] = {
        "input_norm": norms(hidden),
        "mlp_norm": norms(hidden),
        "post_attention_norm": norms(hidden, post_norms),
        "post_mlp_norm": norms(hidden, post_norms),
        "q_norm": norms(head_size, qk_norm),
        "k_norm": norms(head_size, qk_norm),
        "qkv": numbers.linear((heads + 2 * kv_heads) * head_size, hidden, bias=bias),
        "out": numbers.linear(hidden, heads * head_size, bias=bias),
        "gate_up": numbers.linear(2 * inner, hidden, bias=bias),
        "down": numbers.linear(hidden, inner, bias=bias),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": head_size,
        "intermediate_size": inner,
        "activation": "silu",
        "scale": head_size**-0.5,
        "rope_table": 0,
        "rotary_dim": head_size,
    }
    return DecoderLayer(**(fields | more))


def make_stack(family: str, dtype: torch.dtype) -> DecoderStack:
    """Return three layers in the manner of a family."""
    numbers = Numbers(dtype)
    kinds: dict[str, list[dict[str, Any]]] = {
        "llama": [{}] * 3,
        "qwen2": [{"bias": True}] * 3,
        "qwen3": [{"qk_norm": True, "heads": 4, "kv_heads": 4}] * 3,
        "gemma2": [
            {
                "post_norms": True,
                "soft_cap": 30.0,
                "window": window,
                "activation": "gelu_tanh",
                "norm_dtype": torch.float32,
            }
            for window in (0, 50, 0)
        ],
        "gemma3": [
            {
                "post_norms": True,
                "qk_norm": True,
                "window": w,
                "rope_table": t,
                "activation": "gelu_tanh",
                "norm_dtype": torch.float32,
            }
            for w, t in ((50, 1), (50, 1), (0, 0))
        ],
        "odd": [
            {
                "inner": 77,
                "activation": "gelu",
                "rotary_dim": 16,
                "rope_table": 2,
                "is_neox": False,
                "heads": 5,
                "kv_heads": 1,
                "head_size": 24,
            },
            {"rope_table": None, "sink_tokens": 2, "window": 33, "sinks": torch.linspace(-1, 1, 6)},
            {
                "head_size": 64,
                "rope_table": 3,
                "chunk_tokens": 40,
                "activation": "gelu",
                "bias": True,
            },
        ],
    }
    layers = [make_layer(numbers, **kind) for kind in kinds[family]]
    final = numbers.norm(96, layers[0].input_norm.dtype)
    return DecoderStack(layers, hidden_size=96, epsilon=EPSILON, final_norm=final)


FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "odd")


def rope_tables() -> list[Tensor]:
    """Return tables of 32, 32 (another base), 16 and 64 turning elements."""
    tables = []
    for dim, base in ((32, 1e4), (32, 1e6), (16, 1e4), (64, 1e4)):
        angles = torch.arange(NUM_POSITIONS)[:, None] / base ** (torch.arange(0, dim, 2) / dim)
        tables.append(torch.cat((angles.cos(), angles.sin()), 1))
    return tables


class Rows:
    """Sequences and the caches of all layers; even layers are one cache group, odd ones another."""

    def __init__(self, stack: DecoderStack, lens: list[int], dtype: torch.dtype) -> None:
        self.stack = stack
        self.hidden = [random_rows(n, 96, dtype=dtype, seed=1000 + i) for i, n in enumerate(lens)]
        self.groups = [i % 2 for i in range(len(stack.layers))]
        self.caches: list[PagedCache] = [
            make_paged_cache(lens, layer.num_kv_heads, layer.head_size, 16, dtype, seed=group)
            for layer, group in zip(stack.layers, self.groups, strict=True)
        ]
        # One block table a group: units of a block differ between layers, so each has its own here.
        self.tables = rope_tables()

    def run(self, op: Any, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """Run positions begin … end - 1 of each (row, begin, end) through the layers."""
        hidden = torch.cat([self.hidden[row][begin:end] for row, begin, end in parts])
        rows = [row for row, _, _ in parts]
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in parts])
        lens = [end - begin for _, begin, end in parts]
        op(
            hidden,
            self.stack,
            positions,
            cumulative(lens),
            torch.tensor([end for _, _, end in parts]).int(),
            [cache.block_offsets[rows] for cache in self.caches],
            [torch.cat([cache.slots(*part) for part in parts]) for cache in self.caches],
            [cache.key for cache in self.caches],
            [cache.value for cache in self.caches],
            list(range(len(self.caches))),
            self.tables,
        )
        return list(hidden.split(lens))


def composed_doors(hidden: Tensor, stack: DecoderStack, positions: Tensor, *rest: Any) -> None:
    """Run the single compiled ops one after the other."""
    cu_query_lens, seq_lens, offsets, slots, keys, values, groups, tables = rest
    compose_decoder_layers(
        DOORS,
        hidden,
        stack,
        positions,
        (cu_query_lens, seq_lens),
        [(offsets[group], slots[group]) for group in groups],
        list(zip(keys, values, strict=True)),
        tables,
    )


PARTS = [(0, 0, 61), (1, 0, 5), (2, 0, 130)]
NEXT = [(2, 130, 131), (0, 61, 62), (1, 5, 40)]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_as_the_single_ops(isa: str, dtype: torch.dtype, family: str) -> None:
    stack = make_stack(family, dtype)
    fused, single = (Rows(stack, [140, 70, 140], dtype) for _ in range(2))
    for parts in (PARTS, NEXT, [(0, 62, 63)]):
        for actual, expected in zip(
            fused.run(decoder_layers, parts), single.run(composed_doors, parts), strict=True
        ):
            assert torch.equal(actual, expected)
    for a, b in zip(fused.caches, single.caches, strict=True):
        torch.testing.assert_close(a.key, b.key, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(a.value, b.value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_near_the_twin(dtype: torch.dtype, family: str) -> None:
    stack = make_stack(family, dtype)
    fused, naive = (Rows(stack, [140, 70, 140], dtype) for _ in range(2))
    # bfloat16: roundings of three layers fall to either side; the mean stays within a step.
    tolerance, mean = (2e-5, 2e-6) if dtype == torch.float32 else (1e-1, 1.2e-2)
    for parts in (PARTS, NEXT):
        for actual, expected in zip(
            fused.run(decoder_layers, parts), naive.run(naive_decoder_layers, parts), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
            assert (actual - expected).abs().mean() < mean


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_same_bits_however_a_row_is_computed(isa: str, dtype: torch.dtype, family: str) -> None:
    stack = make_stack(family, dtype)
    length = 530
    whole = Rows(stack, [length, 64], dtype).run(decoder_layers, [(0, 0, length)])[0]
    for chunk, threads in ((16, 2), (200, 1), (512, 2), (529, 3)):
        torch.set_num_threads(threads)
        rows = Rows(stack, [length, 64], dtype)
        for step, begin in enumerate(range(0, length, chunk)):
            end = min(begin + chunk, length)
            others = [(1, step, step + 1)] if step < 64 else []
            result = rows.run(decoder_layers, [*others, (0, begin, end)])[-1]
            assert torch.equal(result, whole[begin:end]), (chunk, begin)


def test_without_final_norm_the_stream_is_returned() -> None:
    numbers = Numbers(torch.bfloat16)
    layers = [make_layer(numbers), make_layer(numbers)]
    stack = DecoderStack(layers, hidden_size=96, epsilon=EPSILON)
    for parts in ([(0, 0, 3)], [(0, 0, 30)]):
        fused, single = (Rows(stack, [30], torch.bfloat16) for _ in range(2))
        assert torch.equal(
            fused.run(decoder_layers, parts)[0], single.run(composed_doors, parts)[0]
        )


def test_a_cache_group_without_a_layer_is_not_read() -> None:
    stack = make_stack("llama", torch.bfloat16)
    parts = [(0, 0, 20)]
    expected = Rows(stack, [20], torch.bfloat16).run(decoder_layers, parts)[0]
    broken = torch.full((1, 2), -7).int()

    def run_with_another_group(*arguments: Any) -> None:
        given = list(arguments)
        given[5] = [broken, *given[5]]
        given[6] = [broken, *given[6]]
        given[9] = [group + 1 for group in given[9]]
        decoder_layers(*given)

    actual = Rows(stack, [20], torch.bfloat16).run(run_with_another_group, parts)[0]
    assert torch.equal(actual, expected)


def test_skipped_tokens_are_not_cached() -> None:
    stack = make_stack("llama", torch.float32)
    rows = Rows(stack, [20], torch.float32)

    def run_without_slots(*arguments: Any) -> None:
        for slots in arguments[6]:
            slots[:, 0] = -1
        decoder_layers(*arguments)

    kept = Rows(stack, [20], torch.float32).run(decoder_layers, [(0, 0, 20)])[0]
    assert torch.equal(rows.run(run_without_slots, [(0, 0, 20)])[0], kept)
    assert all(cache.key.isnan().all() for cache in rows.caches)


def test_no_tokens() -> None:
    rows = Rows(make_stack("llama", torch.float32), [4], torch.float32)
    decoder_layers(
        torch.empty(0, 96),
        rows.stack,
        torch.empty(0, dtype=torch.int64),
        cumulative([]),
        torch.empty(0).int(),
        [c.block_offsets[:0] for c in rows.caches],
        [torch.empty(0, 2).int() for _ in rows.caches],
        [c.key for c in rows.caches],
        [c.value for c in rows.caches],
        [0, 1, 2],
        rows.tables,
    )


def test_stack_keeps_its_weights_alive() -> None:
    stack = make_stack("llama", torch.float32)
    rows = Rows(stack, [8], torch.float32)
    expected = rows.run(decoder_layers, [(0, 0, 8)])[0]
    stack.layers = ()
    [torch.randn(96, 96) for _ in range(200)]
    assert torch.equal(rows.run(decoder_layers, [(0, 0, 8)])[0], expected)


def test_bad_stacks_name_what_was_given() -> None:
    numbers = Numbers(torch.float32)
    good = make_layer(numbers)

    def make(**change: Any) -> DecoderStack:
        fields = {name: getattr(good, name) for name in DecoderLayer.__dataclass_fields__}
        return DecoderStack([DecoderLayer(**(fields | change))], hidden_size=96, epsilon=EPSILON)

    make()
    for message, change in (
        ("qkv has shape", {"qkv": numbers.linear(96, 96)}),
        ("input_norm|norm", {"input_norm": torch.ones(95)}),
        ("come together", {"q_norm": torch.ones(32)}),
        ("cannot share", {"num_kv_heads": 4}),
        ("down", {"down": numbers.linear(96, 64)}),
        ("turning elements", {"rotary_dim": 33}),
        ("out_bias|out", {"out": PackedLinear(packed=good.out.packed, bias=torch.ones(95))}),
        ("expected Float", {"down": PackedLinear(packed=good.down.packed.bfloat16())}),
    ):
        with pytest.raises(ShapeError, match=message):
            make(**change)


def test_bad_steps_name_what_was_given() -> None:
    rows = Rows(make_stack("llama", torch.float32), [20], torch.float32)

    def run(**change: Any) -> None:
        def op(*arguments: Any) -> None:
            names = decoder_layers.__code__.co_varnames
            given = dict(zip(names, arguments, strict=False)) | change
            decoder_layers(**given)

        rows.run(op, [(0, 0, 20)])

    run()
    for message, change in (
        ("hidden is BFloat16", {"hidden_TE": torch.empty(20, 96).bfloat16()}),
        ("positions has shape", {"positions_T": torch.arange(19)}),
        ("positions run from 0 to 700", {"positions_T": torch.arange(681, 701)}),
        ("2 key caches", {"key_caches": [c.key for c in rows.caches[:2]]}),
        ("names group 3", {"cache_groups": [0, 1, 3]}),
        ("the layers use 1", {"rope_tables": []}),
        ("20 new tokens of 3", {"seq_lens": torch.tensor([3]).int()}),
        (r"slots\[0\]", {"slots": [torch.full((20, 2), 99999).int()] * 3}),
    ):
        with pytest.raises(ShapeError, match=message):
            run(**change)
    with pytest.raises(ShapeError, match="make_decoder_stack"):
        rows.stack.handle = torch.zeros(3, dtype=torch.uint8)
        run()
