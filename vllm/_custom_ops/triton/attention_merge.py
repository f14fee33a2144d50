"""What queries read of two sets of keys, merged by the denominators of both. Triton.

Called by `_custom_ops/triton/cudnn.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.launch import fast_launch
from vllm.utils.math import cdiv, next_power

_BLOCK = 16


@fast_launch
@triton.jit(do_not_specialize=["num_pairs"])
def _merge_kernel(
    out,
    first,
    second,
    first_sums,
    second_sums,
    num_pairs,
    out_token_stride,
    out_head_stride,
    first_token_stride,
    first_head_stride,
    second_token_stride,
    second_head_stride,
    first_sums_token_stride,
    first_sums_head_stride,
    second_sums_token_stride,
    second_sums_head_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK pairs of token and head."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token, head, is_pair = pair // HEADS, pair % HEADS, pair < num_pairs
    places = token * first_sums_token_stride + head * first_sums_head_stride
    first_sum = tl.load(first_sums + places, mask=is_pair, other=0.0)
    places = token * second_sums_token_stride + head * second_sums_head_stride
    second_sum = tl.load(second_sums + places, mask=is_pair, other=0.0)
    share = 1.0 / (1.0 + tl.exp(second_sum - first_sum))
    element = tl.arange(0, BLOCK_D)[None, :]
    is_in = is_pair[:, None] & (element < SIZE)
    places = (token * first_token_stride + head * first_head_stride)[:, None] + element
    one = tl.load(first + places, mask=is_in, other=0.0).to(tl.float32)
    places = (token * second_token_stride + head * second_head_stride)[:, None] + element
    other = tl.load(second + places, mask=is_in, other=0.0).to(tl.float32)
    merged = other + (one - other) * share[:, None]
    places = (token * out_token_stride + head * out_head_stride)[:, None] + element
    tl.store(out + places, merged.to(out.dtype.element_ty), mask=is_in)


def merge_attention(
    out_THV: Tensor,
    first_THV: Tensor,
    second_THV: Tensor,
    first_sums_TH: Tensor,
    second_sums_TH: Tensor,
) -> None:
    """Write what queries read of both sets of keys.

    Args:
        out_THV: contiguous in V; overwritten.
        first_THV: what they read of one set; contiguous in V.
        second_THV: of the other.
        first_sums_TH: float32, natural logarithms of the softmax denominators of one set.
        second_sums_TH: of the other.
    """
    num_tokens, heads, size = out_THV.shape
    num_pairs = num_tokens * heads
    _merge_kernel[(cdiv(num_pairs, _BLOCK),)](
        out_THV,
        first_THV,
        second_THV,
        first_sums_TH,
        second_sums_TH,
        num_pairs,
        *out_THV.stride()[:2],
        *first_THV.stride()[:2],
        *second_THV.stride()[:2],
        *first_sums_TH.stride(),
        *second_sums_TH.stride(),
        HEADS=heads,
        SIZE=size,
        BLOCK=_BLOCK,
        BLOCK_D=next_power(size),
    )
