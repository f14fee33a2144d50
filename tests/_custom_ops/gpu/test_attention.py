"""Attention kernels on a GPU in real sizes: against float32, in a graph, alone and in a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests._custom_ops.gpu.graphs import capture
from tests._custom_ops.gpu.tensors import NEEDS_GPU
from vllm.attention.backends.abstract import AttentionParams
from vllm.attention.backends.torch_sdpa import attend_row

pytestmark = NEEDS_GPU
BLOCK_TOKENS = 16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 4e-3}


class Rows:
    """Rows of (computed, new) tokens in scattered blocks of an arena that is else NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        size: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        has_one_field: bool = False,
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(size)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

        self.rows, self.has_one_field = rows, has_one_field
        self.new = [n for _, n in rows]
        self.query = draw(sum(self.new), heads, size)
        self.keys = [draw(c + n, kv_heads, size) for c, n in rows]
        self.values = self.keys if has_one_field else [torch.randn_like(k) for k in self.keys]
        blocks = [-(-(c + n) // BLOCK_TOKENS) for c, n in rows]
        elements = BLOCK_TOKENS * kv_heads * size
        unit = 256 // dtype.itemsize
        block_units = -(-2 * elements // unit) + 1
        num_units = (sum(blocks) + 1) * block_units
        arena = torch.full(((num_units + block_units) * unit,), float("nan"), dtype=dtype).cuda()
        shape = (num_units, BLOCK_TOKENS, kv_heads, size)
        strides = (unit, kv_heads * size, size, 1)
        self.key_cache = arena.as_strided(shape, strides)
        self.value_cache = arena.as_strided(shape, strides, elements)
        if has_one_field:
            self.value_cache = self.key_cache
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0))
        self.offsets = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
        for i, ids in enumerate(torch.split(order, blocks)):
            self.offsets[i, : len(ids)] = ids * block_units
            positions = torch.arange(rows[i][0])
            unit_of = self.offsets[i].long()[positions // BLOCK_TOKENS].cuda()
            for cache, source in ((self.key_cache, self.keys), (self.value_cache, self.values)):
                cache[unit_of, positions.cuda() % BLOCK_TOKENS] = source[i][: rows[i][0]]
        self.offsets = self.offsets.cuda()

    def make_args(self, params: AttentionParams, chosen: list[int]):
        """Return the kernels' arguments for some of the rows."""
        from vllm._custom_ops.triton.attention_args import AttentionArgs

        starts = torch.tensor([0, *self.new]).cumsum(0).tolist()
        query = torch.cat([self.query[starts[i] : starts[i + 1]] for i in chosen])
        fresh = [
            torch.cat([source[i][self.rows[i][0] :] for i in chosen])
            for source in (self.keys, self.values)
        ]
        return AttentionArgs(
            out=torch.full_like(query, float("nan")),
            query=query,
            key_cache=self.key_cache,
            value_cache=self.value_cache,
            block_offsets=self.offsets[chosen].contiguous(),
            cu_query_lens=torch.tensor([0, *(self.new[i] for i in chosen)]).cumsum(0).int().cuda(),
            seq_lens=torch.tensor([sum(self.rows[i]) for i in chosen]).int().cuda(),
            scale=params.scale,
            window=params.window,
            soft_cap=params.soft_cap,
            sinks=params.sinks,
            sink_tokens=params.sink_tokens,
            chunk_tokens=params.chunk_tokens,
            fresh_key=fresh[0],
            fresh_value=fresh[0] if self.has_one_field else fresh[1],
        )

    def attend(self, params: AttentionParams, chosen: list[int] | None = None) -> list[Tensor]:
        """Attend for some of the rows, decode rows first; what each has written."""
        from vllm._custom_ops.triton.attention import attend

        chosen = list(range(len(self.rows))) if chosen is None else chosen
        args = self.make_args(params, chosen)
        lens = [self.new[i] for i in chosen]
        attend(
            args,
            num_decode_rows=sum(n == 1 for n in lens),
            max_query_len=max(lens),
            max_seq_len=max(sum(self.rows[i]) for i in chosen),
        )
        return list(args.out.split(lens))

    def expect(self, params: AttentionParams) -> list[Tensor]:
        """Return float32 results of all rows."""
        parts = self.query.split(self.new)
        return [
            attend_row(q, k, v, params)
            for q, k, v in zip(parts, self.keys, self.values, strict=True)
        ]


PLAIN = AttentionParams(scale=0.08)
MASKS = {
    "full": PLAIN,
    "window": replace(PLAIN, window=1024),
    "window and sinks": replace(PLAIN, window=500, sink_tokens=4),
    "chunk": replace(PLAIN, chunk_tokens=1000),
    "soft cap": replace(PLAIN, soft_cap=30.0),
}
LENS = [(4095, 1), (0, 1), (1300, 1), (0, 700), (2047, 333), (5, 16)]


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for f, e in zip(found, expected, strict=True):
        tolerance = TOLERANCE[f.dtype]
        torch.testing.assert_close(f.float(), e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("params", MASKS.values(), ids=MASKS.keys())
def test_masks(params: AttentionParams, dtype: torch.dtype) -> None:
    rows = Rows(LENS, 14, 2, 128, dtype)
    assert_near(rows.attend(params), rows.expect(params))


def test_learned_sinks() -> None:
    rows = Rows(LENS, 14, 2, 64)
    params = replace(PLAIN, sinks=torch.linspace(-1.0, 3.0, 14).cuda(), window=128)
    assert_near(rows.attend(params), rows.expect(params))


@pytest.mark.parametrize("size", [64, 80, 96, 112, 192, 256, 512])
def test_head_sizes(size: int) -> None:
    rows = Rows(LENS, 8, 4, size)
    assert_near(rows.attend(PLAIN), rows.expect(PLAIN))


@pytest.mark.parametrize("heads", [16, 128])
def test_latent_rows(heads: int) -> None:
    rows = Rows(LENS, heads, 1, 576, has_one_field=True)
    params = replace(PLAIN, scale=0.04)
    assert_near(rows.attend(params), rows.expect(params))


def test_a_row_does_not_feel_its_batch() -> None:
    """Splits follow the size of the batch, so that sums may differ in their last bits."""
    rows = Rows(LENS, 28, 4, 128)
    together = rows.attend(PLAIN)
    for i, expected in enumerate(together):
        [alone] = rows.attend(PLAIN, [i])
        torch.testing.assert_close(alone, expected, rtol=8e-3, atol=1e-3)
        if rows.new[i] > 1:
            assert torch.equal(alone, expected)


def test_runs_repeat_bit_for_bit() -> None:
    rows = Rows([(4000 - 60 * i, 1) for i in range(64)], 28, 4, 128)
    first = rows.attend(PLAIN)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(rows.attend(PLAIN), first, strict=True))


def test_a_graph_serves_rows_of_other_lengths() -> None:
    from vllm._custom_ops.triton.attention_decode import decode_attention

    rows = Rows([(n, 1) for n in (4000, 100, 2500, 0, 777, 64, 63, 1)], 28, 4, 128)
    args = rows.make_args(PLAIN, list(range(8)))
    lens = args.seq_lens.clone()
    graph = capture(lambda: decode_attention(args, 8, 8192))
    for keep in (8, 5):
        args.seq_lens.copy_(lens)
        args.seq_lens[keep:] = 0
        args.out.fill_(float("nan"))
        decode_attention(args, 8, 8192)
        eager = args.out.clone()
        args.out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(args.out, eager)
        assert torch.equal(eager[keep:], torch.zeros_like(eager[keep:]))
        expected = [e[0] for e in rows.expect(PLAIN)[:keep]]
        assert_near(list(eager[:keep]), expected)


def test_whole_prompts_need_no_cache() -> None:
    from vllm._custom_ops.triton.attention import prompt_attention

    rows = Rows([(0, 1500), (0, 3), (0, 129)], 16, 16, 192)
    args = rows.make_args(PLAIN, [0, 1, 2])
    prompt_attention(
        args.out,
        args.query,
        args.fresh_key,
        args.fresh_value,
        args.cu_query_lens,
        1500,
        PLAIN.scale,
    )
    assert_near(list(args.out.split(rows.new)), rows.expect(PLAIN))


def test_torchs_attention_of_equal_prompts() -> None:
    from vllm._custom_ops.triton.cudnn import attend_equal_prompts

    rows = Rows([(0, 1024), (0, 1024)], 28, 4, 128)
    args = rows.make_args(PLAIN, [0, 1])
    attend_equal_prompts(args.out, args.query, args.fresh_key, args.fresh_value, 1024, PLAIN.scale)
    assert_near(list(args.out.split(1024)), rows.expect(PLAIN))
