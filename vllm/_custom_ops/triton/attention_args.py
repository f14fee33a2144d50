"""The arguments of an attention launch, checked once, and what the kernels derive from them.

Built by `attention.py` and by the attention backend that asks which kernel serves; read by the
kernels beside it. Nothing here looks at the contents of a device tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm._custom_ops.triton.attention_shape import split_head
from vllm.errors import ShapeError

_NO_LIMIT = 1 << 30  # a window or a chunk that no sequence outgrows
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionArgs:
    """What the door of `paged_attention` says, in the same words.

    Attributes:
        key_cache: None where no row has anything in the cache.
        fresh_value: without a cache a value may be shorter than a key: the first part of a head, as
            `split_head` cuts it.
        cu_key_lens: int32 [B + 1] where the new rows of K and V are more than those of the queries:
            the last ones up to each row's end. None where they are the same.
        prefix: what comes before new rows; the kernel for Hopper alone knows it.
    """

    out: Tensor
    query: Tensor
    key_cache: Tensor | None
    value_cache: Tensor | None
    block_offsets: Tensor | None
    cu_query_lens: Tensor
    seq_lens: Tensor
    scale: float
    window: int
    soft_cap: float
    sinks: Tensor | None
    sink_tokens: int
    chunk_tokens: int
    fresh_key: Tensor | None
    fresh_value: Tensor | None
    cu_key_lens: Tensor | None = None
    prefix: PrefixRows | None = None

    def check(self) -> None:
        """Raise ShapeError for arguments that a kernel would misread."""
        heads, size = self.query.shape[1:]
        is_cached = self.key_cache is not None
        rows = self.key_cache if is_cached else self.fresh_key
        values = self.value_cache if is_cached else self.fresh_value
        _require(rows is not None, "neither a cache nor new rows are given")
        assert rows is not None and values is not None
        _require(self.query.dtype in _DTYPES, f"query has dtype {self.query.dtype}")
        value_size = values.shape[-1]
        out_shape = (*self.query.shape[:2], value_size)
        _require(self.out.shape == out_shape, f"out has shape {tuple(self.out.shape)}")
        _require(rows.dtype == self.query.dtype, f"K has dtype {rows.dtype}")
        _require(rows.shape[-1] == size, f"K has heads of {rows.shape[-1]}, query of {size}")
        _require(size % 8 == 0 and size <= 640, f"head size is {size}")
        _require(heads % rows.shape[-2] == 0, f"{heads} heads cannot share {rows.shape[-2]}")
        sizes = {size} if is_cached else {size, split_head(size)[0]}
        is_value = values.shape[:-1] == rows.shape[:-1] and value_size in sizes
        _require(is_value, f"V has shape {tuple(values.shape)}")
        _require(
            not is_cached or values.stride() == rows.stride(),
            f"K has strides {rows.stride()}, V {values.stride()}",
        )
        tensors = (self.out, self.query, rows, values, self.fresh_key, self.fresh_value)
        _require(all(t is None or t.stride(-1) == 1 for t in tensors), "a head must be contiguous")

    def without_fresh(self) -> AttentionArgs:
        """Return these arguments for rows whose K and V are all in the cache."""
        return replace(self, fresh_key=None, fresh_value=None)

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        rows = self.key_cache if self.key_cache is not None else self.fresh_key
        assert rows is not None
        return rows.shape[-2]

    @property
    def group(self) -> int:
        """Query heads that share a head of K and V."""
        return self.query.shape[1] // self.num_kv_heads

    @property
    def has_one_field(self) -> bool:
        """Whether a row is key and value at once."""
        if self.key_cache is None or self.value_cache is None:
            return self.fresh_key is self.fresh_value
        is_one_fresh = self.fresh_key is self.fresh_value or (
            self.fresh_key is not None
            and self.fresh_value is not None
            and self.fresh_key.data_ptr() == self.fresh_value.data_ptr()
        )
        return self.key_cache.data_ptr() == self.value_cache.data_ptr() and is_one_fresh

    @property
    def precision(self) -> str:
        """How a dot product of two tiles is computed."""
        return "ieee" if self.query.dtype == torch.float32 else "tf32"

    def mask(self) -> tuple[int, int, int]:
        """Return (window, sink tokens, chunk) with numbers in place of what is not limited."""
        return self.window or _NO_LIMIT, self.sink_tokens, self.chunk_tokens or _NO_LIMIT

    def longest_view(self, max_seq_len: int) -> int:
        """Return the most keys that one position of a sequence of this length sees."""
        window, sink_tokens, chunk_tokens = self.mask()
        return min(max_seq_len, min(window, chunk_tokens) + sink_tokens)

    @property
    def block_tokens(self) -> int:
        """Tokens of a cache block; any number where there is no cache."""
        return 16 if self.key_cache is None else self.key_cache.shape[1]

    def launch_arguments(
        self, *, has_value_strides: bool = False
    ) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
        """Return the kernels' tensors and strides in their order.

        What is absent is stood for by something of the same type that a kernel never reads.

        Args:
            has_value_strides: whether the kernel takes strides of new values behind those of keys.
        """
        key, value = self.fresh_key, self.fresh_value
        value_strides = () if value is None else value.stride()[:2]
        if has_value_strides:
            value_strides = value_strides or (0, 0)
        elif key is not None and value is not None and key.stride() != value.stride():
            key, value = key.contiguous(), value.contiguous()
        cache, table = self.key_cache, self.block_offsets
        tensors = (
            self.out,
            self.query,
            self.query if cache is None else cache,
            self.query if cache is None else self.value_cache,
            self.query if key is None else key,
            self.query if value is None else value,
            self.cu_query_lens if table is None else table,
            self.cu_query_lens,
            self.seq_lens,
            self.sinks,
        )
        strides = (
            0 if table is None else table.stride(0),
            *self.out.stride()[:2],
            *self.query.stride()[:2],
            *((0, 0, 0) if cache is None else cache.stride()[:3]),
            *((0, 0) if key is None else key.stride()[:2]),
            *(value_strides if has_value_strides else ()),
        )
        return tensors, strides


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkRows:
    """Rows with few new tokens, behind the decode rows.

    Attributes:
        rows: int32, which they are.
        most_tokens: rows that are not among them have more new tokens.
        max_query_len, max_seq_len: maxima over them.
        are_all: whether there are no other rows behind the decode rows.
    """

    rows: Tensor
    most_tokens: int
    max_query_len: int
    max_seq_len: int
    are_all: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedRows:
    """How many rows of K and V of each row of a batch are laid behind each other.

    They are the last ones before the row's end, or before where its new rows are read in place.

    Attributes:
        cu_key_lens: int32 [B + 1].
        num_keys: their sum.
        max_key_len: the most of one row.
        has_new: whether the row's end is meant, else the first multiple of `PREFIX_ALIGNMENT` that
            no cached row lies behind, or the end if that comes first.
    """

    cu_key_lens: Tensor
    num_keys: int
    max_key_len: int
    has_new: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixRows:
    """What `JoinedRows` without `has_new` describes.

    Attributes:
        key, value: [rows, Hkv, D].
        cu_lens: int32 [B + 1].
    """

    key: Tensor
    value: Tensor
    cu_lens: Tensor


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise ShapeError(f"paged_attention: {what}")
