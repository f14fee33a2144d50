"""Whole prompts of one length by cuDNN's attention, which torch brings.

Called by `attention/backends/triton.py` and, through `attention.py`, by `layers/mla.py`, where the
kernel of `attention_hopper.py` does not serve, with lengths that the host knows. cuDNN builds a
plan for each length, which takes as long as a prompt: only long ones in steps of 128 are worth one.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vllm._custom_ops.triton.device import is_hopper

MAX_PLAIN_HEAD_SIZE = 128
"""Larger heads, and values shorter than keys, were measured on an H200 only."""

MIN_EQUAL_TOKENS = 1024
EQUAL_STEP = 128
"""Tokens of a prompt."""


@functools.cache
def can_serve(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    value_size: int,
) -> bool:
    """Return whether cuDNN has a kernel for these heads on a device."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    is_plain = head_size == value_size and head_size <= MAX_PLAIN_HEAD_SIZE
    if not is_plain and not is_hopper(device):
        return False
    query, key, value = (
        torch.empty(1, MIN_EQUAL_TOKENS, heads, size, device=device, dtype=dtype).transpose(1, 2)
        for heads, size in (
            (num_heads, head_size),
            (num_kv_heads, head_size),
            (num_kv_heads, value_size),
        )
    )
    cuda = torch.backends.cuda
    params = cuda.SDPAParams(query, key, value, None, 0.0, True, num_heads != num_kv_heads)
    return bool(cuda.can_use_cudnn_attention(params))


def serves_rows(query_THD: Tensor, key_SHD: Tensor | None, value_SHV: Tensor | None) -> bool:
    """Return whether cuDNN has a kernel for heads of these tensors."""
    if key_SHD is None or value_SHV is None:
        return False
    (heads, size), (kv_heads, value_size) = query_THD.shape[1:], value_SHV.shape[1:]
    return can_serve(query_THD.device, query_THD.dtype, heads, kv_heads, size, value_size)


def is_length_served(prompt_len: int) -> bool:
    """Return whether whole prompts of one length are worth a plan."""
    return prompt_len >= MIN_EQUAL_TOKENS and prompt_len % EQUAL_STEP == 0


def attend_equal_prompts(
    out_THV: Tensor,
    query_THD: Tensor,
    key_THD: Tensor,
    value_THV: Tensor,
    prompt_len: int,
    scale: float,
) -> None:
    """Attend within whole prompts of one length.

    Args:
        out_THV: [T, H, V], T a multiple of `prompt_len`; overwritten.
        query_THD: [T, H, D].
        key_THD: [T, Hkv, D].
        value_THV: [T, Hkv, V].
        prompt_len: tokens of each prompt.
        scale: factor of the logits.
    """
    query, key, value, out = (
        x.unflatten(0, (-1, prompt_len)).transpose(1, 2)
        for x in (query_THD, key_THD, value_THV, out_THV)
    )
    out.copy_(run(query, key, value, scale=scale))


def run(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Attend by cuDNN, causally.

    Args:
        query: [B, H, T, D].
        key: [B, Hkv, T, D].
        value: [B, Hkv, T, V].
        scale: factor of the logits.

    Returns:
        What was read, [B, H, T, V].
    """
    read, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, False, 0.0, True, False, scale=scale
    )
    return read
