"""Long prompts by cuDNN's attention, which torch brings and which no kernel that pages comes near.

Called by `attention/backends/triton.py` and, through `attention.py`, by `layers/mla.py`, with
lengths that the host knows. cuDNN builds a plan for each pair of lengths, which takes as long as a
prompt: lengths are padded to multiples of 1,024, so that there are few. A row's cached tokens up to
such a multiple are attended to without a mask, the others causally together with the new ones, and
both results are merged by their denominators, as splits of a decode row are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm._custom_ops.triton.device import is_hopper

MAX_PLAIN_HEAD_SIZE = 128
"""Larger heads, and values shorter than keys, were measured on an H200 only."""

LENGTH_STEP = 1024
MIN_TOKENS = 2048
"""New tokens of a row; below, padding costs more than what is saved."""

MIN_EQUAL_TOKENS = 1024
EQUAL_STEP = 128
"""Of whole prompts of one length, which need no copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRow:
    """How a row is cut and padded.

    Attributes:
        prefix: cached tokens that are attended to without a mask.
        lead: cached tokens behind those.
        new: new tokens.
        length: lead and new tokens with the padding behind them.
    """

    prefix: int
    lead: int
    new: int
    length: int

    @property
    def num_keys(self) -> int:
        """Rows of K and V with the padding."""
        return self.prefix + self.length

    @property
    def is_exact(self) -> bool:
        """Whether the queries need no padding."""
        return self.length == self.new


def pad_row(computed: int, new: int) -> PaddedRow:
    """Cut a row of so many cached and new tokens."""
    prefix = computed // LENGTH_STEP * LENGTH_STEP
    lead = computed - prefix
    length = -(-(lead + new) // LENGTH_STEP) * LENGTH_STEP
    return PaddedRow(prefix=prefix, lead=lead, new=new, length=length)


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
    read, _ = run(query, key, value, is_causal=True, has_sums=False, scale=scale)
    out.copy_(read)


def attend_padded(
    out_THV: Tensor,
    query_THD: Tensor,
    key_SHD: Tensor,
    value_SHV: Tensor,
    row: PaddedRow,
    scale: float,
) -> None:
    """Attend from the new tokens of one row to all its tokens.

    Args:
        out_THV: [T, H, V]; overwritten.
        query_THD: [T, H, D].
        key_SHD: [row.num_keys, Hkv, D], the row's keys in their order; finite in the padding.
        value_SHV: same, V elements.
        row: how it is cut.
        scale: factor of the logits.
    """
    if not row.is_exact:
        padded = query_THD.new_empty(row.length, *query_THD.shape[1:])
        padded[row.lead : row.lead + row.new] = query_THD
        padded[: row.lead] = 0.0
        padded[row.lead + row.new :] = 0.0
        query_THD = padded
    query, key, value = (x[None].transpose(1, 2) for x in (query_THD, key_SHD, value_SHV))
    own, own_sums = run(
        query,
        key[:, :, row.prefix :],
        value[:, :, row.prefix :],
        is_causal=True,
        has_sums=row.prefix > 0,
        scale=scale,
    )
    tokens = slice(row.lead, row.lead + row.new)
    if row.prefix == 0:
        out_THV.copy_(own[0, :, tokens].transpose(0, 1))
        return
    before, before_sums = run(
        query,
        key[:, :, : row.prefix],
        value[:, :, : row.prefix],
        is_causal=False,
        has_sums=True,
        scale=scale,
    )
    # Triton may be absent where this file is imported.
    from vllm._custom_ops.triton.attention_merge import merge_attention  # noqa: PLC0415

    merge_attention(
        out_THV,
        *(x[0, :, tokens].transpose(0, 1) for x in (own, before)),
        *(x.view(x.shape[1], -1)[:, tokens].t() for x in (own_sums, before_sums)),
    )


def run(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, has_sums: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend by cuDNN.

    Args:
        query: [B, H, T, D].
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, V].
        is_causal: whether query i sees keys 0 … i, else all.
        has_sums: whether the second result is wanted.
        scale: factor of the logits.

    Returns:
        (what was read, [B, H, T, V]; logarithms of the denominators, float32 [B, H, T, 1]).
    """
    read, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, has_sums, 0.0, is_causal, False, scale=scale
    )
    return read, sums
