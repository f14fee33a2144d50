"""Models on a CPU whose products of few rows leave parts, as they do on a GPU: by naive twins.

The twins of norms and rotary embedding run with and without parts, since compiled ones sum in
another order: what is left to differ are the parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from vllm._custom_ops import linear, norm, rope
from vllm._custom_ops.naive import fused_qkv as naive_qkv
from vllm._custom_ops.naive import linear as naive_linear
from vllm._custom_ops.naive import norm as naive_norm
from vllm._custom_ops.naive import rope as naive_rope
from vllm.model_executor.layers import linear as linear_layers
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.layers.parts import Product, ProductParts
from vllm.model_executor.models import heads


def finish_product(product: ProductParts) -> torch.Tensor:
    """Return a product as what takes its parts sums and rounds it."""
    total_TN = naive_linear.sum_parts(product.parts_PTN)
    if product.bias_N is not None:
        total_TN += product.bias_N
    return total_TN.to(product.dtype)


@contextmanager
def leave_parts(num_parts: int, *, finish: bool) -> Iterator[Counter[str]]:
    """Have products of few rows leave so many parts while the block runs.

    Args:
        num_parts: of every product, wherever layers ask.
        finish: add them up and round them at once; the ops behind get whole products.

    Yields:
        How often each op was given parts.
    """
    found: Counter[str] = Counter()
    multiply = Linear.multiply_to_parts

    def multiply_at_once(self: Linear, x_TK: torch.Tensor) -> Product:
        product = multiply(self, x_TK)
        return finish_product(product) if isinstance(product, ProductParts) else product

    def add_parts_rms_norm(*args: Any) -> None:
        found["norm"] += 1
        naive_norm.add_parts_rms_norm(*args)

    def qkv_norm_rope_cache(*args: Any) -> None:
        found["qkv"] += 1
        naive_qkv.qkv_norm_rope_cache(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Linear, "pack", lambda _self: None)  # on a GPU weights stay plain
        patch.setattr(linear_layers, "count_parts", lambda *_shape: num_parts)
        patch.setattr(linear, "skinny_linear_parts", naive_linear.skinny_linear_parts)
        patch.setattr(norm, "rms_norm", naive_norm.rms_norm)
        patch.setattr(norm, "fused_add_rms_norm", naive_norm.fused_add_rms_norm)
        patch.setattr(norm, "add_parts_rms_norm", add_parts_rms_norm)
        patch.setattr(rope, "rotary_embedding", naive_rope.rotary_embedding)
        patch.setattr(heads, "qkv_norm_rope_cache", qkv_norm_rope_cache)
        if finish:
            patch.setattr(Linear, "multiply_to_parts", multiply_at_once)
        yield found
