"""The forms of attention for prompts on a GPU against float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests._custom_ops.gpu.tensors import NEEDS_GPU
from tests._custom_ops.gpu.test_attention import PLAIN, Rows, assert_near
from tests.utils.paged import cumulative
from vllm._custom_ops.naive import attention as naive
from vllm.attention.backends.long_prompts import plan_chunks, plan_joined

pytestmark = NEEDS_GPU
ROWS = [(900, 1), (1500, 40), (1300, 2100), (0, 2500)]


@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("form", ["cached", "joined", "prefix"])
def test_forms_of_a_step(form: str, size: int) -> None:
    from vllm._custom_ops.triton.attention import attend
    from vllm._custom_ops.triton.attention_hopper import can_attend

    rows = Rows(ROWS, 8, 2, size)
    args = rows.make_args(PLAIN, [0, 1, 2, 3])
    batch: Any = SimpleNamespace(
        num_decode_rows=1,
        new_lens_cpu=tuple(n for _, n in ROWS),
        computed_lens_cpu=tuple(c for c, _ in ROWS),
        has_spare_tokens=False,
        seq_lens=args.seq_lens,
    )
    chunks = plan_chunks(batch)
    assert chunks is not None
    joined = plan_joined(batch, 0, 1, chunks, has_new=form == "joined")
    assert joined is not None
    if form == "prefix" and not can_attend(args):
        pytest.skip("no sm_90")
    attend(
        args,
        num_decode_rows=1,
        max_query_len=2500,
        max_seq_len=3400,
        chunks=chunks,
        joined=None if form == "cached" else joined,
    )
    assert_near(list(args.out.split(rows.new)), rows.expect(PLAIN))


@pytest.mark.parametrize("equal_len", [0, 1024])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "value_size"), [(16, 16, 192, 128), (8, 4, 256, 256)]
)
def test_whole_prompts(
    heads: int, kv_heads: int, size: int, value_size: int, equal_len: int
) -> None:
    from vllm._custom_ops.triton.attention import prompt_attention

    torch.manual_seed(0)
    query, made = (
        torch.randn(2048, n, width, device="cuda", dtype=torch.bfloat16)
        for n, width in ((heads, size), (kv_heads, size + value_size))
    )
    key, value = made[:, :, :size], made[:, :, size:]
    lens = cumulative([1024, 1024]).cuda()
    expected, found = (query.new_empty(2048, heads, value_size) for _ in range(2))
    naive.prompt_attention(expected, query, key, value, lens, 1024, PLAIN.scale)
    prompt_attention(found, query, key, value, lens, 1024, PLAIN.scale, None, equal_len)
    torch.testing.assert_close(found, expected, rtol=1.6e-2, atol=1.6e-2)
