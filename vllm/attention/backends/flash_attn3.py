"""The kernel `flashattn3`: flash-attn 3 for prompts on Hopper, our kernel for decode rows.

Prompts read gathered rows as with flash-attn 2: new rows need not have a place in the cache.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from vllm.attention.backends.abstract import AttentionParams, KernelQuery, Rule
from vllm.attention.backends.contiguous import ContiguousBackend, PromptRows, make_rules


def judge_hopper(query: KernelQuery) -> bool | str:
    """Rule of `capability`: Hopper alone."""
    if query.capability is not None and query.capability[0] == 9:
        return True
    return f"capability {query.capability} is not 9.x"


_RULES = {**make_rules(256, "window", "soft_cap"), "capability": judge_hopper}


class FlashAttn3Backend(ContiguousBackend):
    """Attention by flash-attn 3."""

    name: ClassVar[str] = "flashattn3"
    rules: ClassVar[Mapping[str, Rule]] = _RULES

    def attend_prompts(
        self,
        query_THD: Tensor,
        key_SHD: Tensor,
        value_SHD: Tensor,
        rows: PromptRows,
        params: AttentionParams,
    ) -> Tensor:
        """See `ContiguousBackend.attend_prompts`."""
        package = importlib.import_module("flash_attn_interface")
        found: Any = package.flash_attn_varlen_func(
            query_THD,
            key_SHD,
            value_SHD,
            cu_seqlens_q=rows.cu_query_lens,
            cu_seqlens_k=rows.cu_key_lens,
            max_seqlen_q=max(rows.query_lens),
            max_seqlen_k=max(rows.key_lens),
            softmax_scale=params.scale,
            causal=True,
            window_size=(params.window - 1, 0) if params.window else (-1, -1),
            softcap=params.soft_cap,
        )
        # Some releases return the sums of the softmax beside the result.
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out
