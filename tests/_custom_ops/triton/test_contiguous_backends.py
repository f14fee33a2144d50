"""Backends of packages, with stand-ins for the packages: what is gathered and passed on."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests._custom_ops.triton.test_attention_backend import CASES, SIZE, make_case, run
from vllm._custom_ops.naive import cache as naive_cache
from vllm.attention.backends import triton as triton_backend
from vllm.attention.backends.abstract import AttentionParams
from vllm.attention.backends.table import load_backend
from vllm.attention.backends.torch_sdpa import attend_row


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lens: list[int],
    key_lens: list[int],
    params: AttentionParams,
) -> Tensor:
    """Attend row by row to packed rows."""
    parts = (query.split(query_lens), key.split(key_lens), value.split(key_lens))
    return torch.cat([attend_row(q, k, v, params) for q, k, v in zip(*parts, strict=True)])


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Stand in for flash-attn 2 and 3."""
    assert options["causal"]
    lens = [options[f"cu_seqlens_{name}"].diff().tolist() for name in "qk"]
    assert [max(n) for n in lens] == [options["max_seqlen_q"], options["max_seqlen_k"]]
    left, right = options["window_size"]
    assert right == (-1 if left < 0 else 0)
    params = AttentionParams(
        scale=options["softmax_scale"], window=left + 1, soft_cap=options["softcap"]
    )
    return attend_packed(q, k, v, *lens, params)


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, scale: float
) -> Tensor:
    """Stand in for xformers."""
    rows = [x[0].flatten(1, 2) for x in (query, key, value)]
    out = attend_packed(*rows, *attn_bias, AttentionParams(scale=scale))
    return out.view(query.shape)


class BlockDiagonalCausalFromBottomRightMask:
    """Stand in for the mask of xformers: the lengths."""

    @staticmethod
    def from_seqlens(query_lens: list[int], key_lens: list[int]) -> tuple[list[int], list[int]]:
        return query_lens, key_lens


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put stand-ins in the packages' places; write cache rows by the naive twin."""
    contents: dict[str, Any] = {
        "flash_attn": flash_attn_varlen_func,
        "flash_attn_interface": flash_attn_varlen_func,
        "xformers": None,
        "xformers.ops": memory_efficient_attention,
        "xformers.ops.fmha": None,
        "xformers.ops.fmha.attn_bias": BlockDiagonalCausalFromBottomRightMask,
    }
    for name, content in contents.items():
        module = ModuleType(name)
        if content is not None:
            setattr(module, content.__name__, content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(triton_backend, "reshape_and_cache", naive_cache.reshape_and_cache)


@pytest.mark.parametrize("says_lens", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(
    ("name", "window"), [("flashattn", 0), ("flashattn", 12), ("flashattn3", 12), ("xformers", 0)]
)
def test_equals_the_oracle(
    name: str, window: int, case: tuple[list[tuple[int, int]], int], says_lens: bool
) -> None:
    cache, batch, fresh = make_case(case[0], num_decode_rows=case[1], says_lens=says_lens)
    params = AttentionParams(scale=SIZE**-0.5, window=window)
    expected = run(load_backend("torch"), cache, batch, fresh, params)
    if window:  # freed before the window: reading it would show
        group = batch.groups[0]
        for row, seq_len in enumerate(batch.seq_lens.tolist()):
            new = int(batch.cu_query_lens.diff()[row])
            for position in range(max(0, seq_len - new - window + 1)):
                unit = group.block_offsets[row, position // 16].item()
                for field in cache.tensors:
                    field[unit, position % 16] = float("nan")
    found = run(load_backend(name), cache, batch, fresh, params)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["flashattn", "xformers"])
def test_a_layer_that_reads_anothers_cache(name: str) -> None:
    cache, batch, fresh = make_case([(40, 1), (9, 20)], num_decode_rows=1, says_lens=True)
    params = AttentionParams(scale=SIZE**-0.5)
    owner = run(load_backend("torch"), cache, batch, fresh, params)
    reader = AttentionParams(scale=SIZE**-0.5, writes_cache=False)
    found = run(load_backend(name), cache, batch, (fresh[0], None, None), reader)
    torch.testing.assert_close(found, owner, rtol=1e-5, atol=1e-5)
