"""The kernel `flashattn3`: flash-attn 3 for prompts on Hopper, our kernel for decode rows.

Prompts read gathered rows as with flash-attn 2: new rows need not have a place in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vllm.attention.backends.abstract import KernelQuery, Rule
from vllm.attention.backends.contiguous import make_rules
from vllm.attention.backends.flash_attn import FlashAttnBackend


def judge_hopper(query: KernelQuery) -> bool | str:
    """Rule of `capability`: Hopper alone."""
    if query.capability is not None and query.capability[0] == 9:
        return True
    return f"capability {query.capability} is not 9.x"


_RULES = {**make_rules(256, "window", "soft_cap"), "capability": judge_hopper}


class FlashAttn3Backend(FlashAttnBackend):
    """Attention by flash-attn 3, which is called as its predecessor is."""

    name: ClassVar[str] = "flashattn3"
    package: ClassVar[str] = "flash_attn_interface"
    rules: ClassVar[Mapping[str, Rule]] = _RULES
