"""The kernel `xformers`: memory-efficient attention for prompts, our kernel for decode rows."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from vllm.attention.backends.abstract import AttentionParams, Rule
from vllm.attention.backends.contiguous import ContiguousBackend, PromptRows, make_rules


class XformersBackend(ContiguousBackend):
    """Attention by xformers."""

    name: ClassVar[str] = "xformers"
    rules: ClassVar[Mapping[str, Rule]] = make_rules(256)

    def attend_prompts(
        self,
        query_THD: Tensor,
        key_SHD: Tensor,
        value_SHD: Tensor,
        rows: PromptRows,
        params: AttentionParams,
    ) -> Tensor:
        """See `ContiguousBackend.attend_prompts`."""
        ops = importlib.import_module("xformers.ops")
        biases = importlib.import_module("xformers.ops.fmha.attn_bias")
        mask = biases.BlockDiagonalCausalFromBottomRightMask.from_seqlens(
            rows.query_lens, rows.key_lens
        )
        # One batch of five dimensions: [1, rows, KV heads, heads of each, size].
        kv_heads = key_SHD.shape[1]
        query = query_THD.unflatten(1, (kv_heads, -1))[None]
        key, value = (
            x[None, :, :, None].expand(-1, -1, -1, query.shape[3], -1) for x in (key_SHD, value_SHD)
        )
        out: Tensor = ops.memory_efficient_attention(
            query, key, value, attn_bias=mask, scale=params.scale
        )
        return out[0].flatten(1, 2)
