"""What a layer must remember: cache fields, lifetimes, layer specs and groups.

A model builds one :class:`LayerCacheSpec` for each layer from that layer's own heads and sizes;
grouping turns them into :class:`KVCacheGroup`. Memory, admission, prefix reuse and kernel choice
all follow from these statements. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from vllm.types import DType

BLOCK_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheField:
    """One tensor of a layer's cache.

    Attributes:
        name: "k", "v", "state", "conv" ...
        shape: shape of one unit, already divided by the tensor-parallel size; for a field kept per
            token the unit is one token, e.g. (kv_heads, head_size).
        dtype: element type.
        per: "token" or "sequence".
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    per: Literal["token", "sequence"] = "token"

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit (one token, or one sequence)."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """Keeps every token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Keeps the last `tokens` tokens (the current one counted) and the first `sinks` tokens."""

    tokens: int
    sinks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Keeps the tokens of the current chunk of `tokens` positions."""

    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Keeps one state of fixed size for each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """Keeps nothing."""


Lifetime = Full | Window | Chunk | State | Nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCacheSpec:
    """What one layer keeps.

    Attributes:
        layer: index of the decoder layer.
        fields: its cache tensors; empty when it keeps nothing or reads another layer's.
        lifetime: how long a row stays visible.
        kind: name of the layer type, the user's own or the lifetime's ("full", "window" ...).
        reads_from: index of the layer whose cache this one reads, or None.
    """

    layer: int
    fields: tuple[CacheField, ...]
    lifetime: Lifetime
    kind: str = "full"
    reads_from: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes that one token costs in this layer."""
        return sum(f.unit_bytes for f in self.fields if f.per == "token")

    @property
    def sequence_bytes(self) -> int:
        """Bytes that one sequence costs in this layer, whatever its length."""
        return sum(f.unit_bytes for f in self.fields if f.per == "sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldPlace:
    """Where a field of a layer lies inside a block of its group."""

    layer: int
    field: CacheField
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that share a lifetime, and so a block table.

    A block holds `block_tokens` tokens of all layers of the group (every field contiguous inside
    the block), or, for states, one sequence.

    Attributes:
        name: the kind of its layers.
        block_bytes: bytes of one block, a multiple of BLOCK_ALIGNMENT_BYTES.
        places: byte offset of every (layer, field) inside a block.
    """

    name: str
    lifetime: Lifetime
    layers: tuple[int, ...]
    block_tokens: int
    block_bytes: int
    places: tuple[FieldPlace, ...]


def align_up(value: int, alignment: int) -> int:
    """Round `value` up to a multiple of `alignment`."""
    return -(-value // alignment) * alignment


def make_group(name: str, specs: list[LayerCacheSpec], block_tokens: int) -> KVCacheGroup:
    """Lay the fields of `specs` out in one block, each field aligned to 64 bytes.

    Args:
        name: name of the group.
        specs: owners only (no `reads_from`), all of one lifetime.
        block_tokens: tokens of a block; ignored for fields kept per sequence.
    """
    places: list[FieldPlace] = []
    offset = 0
    for spec in specs:
        for field in spec.fields:
            places.append(FieldPlace(layer=spec.layer, field=field, offset_bytes=offset))
            units = block_tokens if field.per == "token" else 1
            offset = align_up(offset + field.unit_bytes * units, 64)
    return KVCacheGroup(
        name=name,
        lifetime=specs[0].lifetime,
        layers=tuple(s.layer for s in specs),
        block_tokens=block_tokens,
        block_bytes=align_up(offset, BLOCK_ALIGNMENT_BYTES),
        places=tuple(places),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """What all ranks agree on for one group; byte sizes are each rank's own.

    Attributes:
        blocks_per_superblock: K_g, blocks of this group that one superblock holds.
    """

    name: str
    layers: tuple[int, ...]
    block_tokens: int
    blocks_per_superblock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The agreed shape of the cache: block id = superblock * K_g + slot, on every rank."""

    groups: tuple[GroupLayout, ...]
    num_superblocks: int
