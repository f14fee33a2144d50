"""The kernel `flashattn`: flash-attn 2 for prompts, our kernel for decode rows.

flash-attn 2 pages only in multiples of 256 tokens, so that prompts read gathered rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from vllm.attention.backends.abstract import AttentionParams, Rule
from vllm.attention.backends.contiguous import ContiguousBackend, PromptRows, make_rules


class FlashAttnBackend(ContiguousBackend):
    """Attention by flash-attn 2.

    Attributes:
        package: what is imported.
    """

    name: ClassVar[str] = "flashattn"
    package: ClassVar[str] = "flash_attn"
    rules: ClassVar[Mapping[str, Rule]] = make_rules(256, "window", "soft_cap")

    def attend_prompts(
        self,
        query_THD: Tensor,
        key_SHD: Tensor,
        value_SHD: Tensor,
        rows: PromptRows,
        params: AttentionParams,
    ) -> Tensor:
        """See `ContiguousBackend.attend_prompts`."""
        found: Any = importlib.import_module(self.package).flash_attn_varlen_func(
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
