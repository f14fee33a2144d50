"""The tensors of one forward pass.

Built by `worker/input_batch.py` from a StepPlan, read by the model, the attention backends and the
sampler, changed by nobody. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBatch:
    """Where the rows of one KV cache group lie, in units of 256 bytes into the arena.

    Attributes:
        block_offsets: int32 [B, max_blocks]; entry (b, i) is the offset of the block that holds
            positions i*block_tokens … of row b. Entries beyond a row's blocks hold the group's pad
            block.
        slots: int32 [T, 2]; (offset of the block, row inside it) where token t's cache row is
            written; offset -1 skips the token.
        block_tokens: tokens of a block.
    """

    block_offsets: Tensor
    slots: Tensor
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One forward pass over T tokens of B rows (rows in batch order, tokens row-major).

    Attributes:
        input_ids: int64 [T].
        positions: int64 [T].
        cu_query_lens: int32 [B + 1], cumulative number of new tokens.
        seq_lens: int32 [B], tokens of a row after this step (computed + new).
        logits_rows: int64 [L], token indices whose logits are needed, in sampling order.
        groups: one entry for each KV cache group.
        max_query_len, max_seq_len: maxima over rows, on the host.
        num_decode_rows: leading rows with exactly one new token.
        new_lens_cpu, computed_lens_cpu: new and computed tokens of each row; both empty where
            whoever built the batch does not say, as for decode steps.
        computed_lens: the latter on the device, int32 [B]; None where it was not made.
        kept_rows: like `logits_rows`, where the model gives no other hidden states: it leaves out
            all other tokens as soon as no layer can need them. None: it gives those of all.
        cut: where some tokens stay behind before the last layer, or None.
        has_spare_tokens: whether tokens may follow those of the last row. Kernels find rows by
            their bounds; what attention and states leave for a spare token is zero.
    """

    input_ids: Tensor
    positions: Tensor
    cu_query_lens: Tensor
    seq_lens: Tensor
    logits_rows: Tensor
    groups: tuple[GroupBatch, ...]
    max_query_len: int
    max_seq_len: int
    num_decode_rows: int
    new_lens_cpu: tuple[int, ...] = ()
    computed_lens_cpu: tuple[int, ...] = ()
    computed_lens: Tensor | None = None
    kept_rows: Tensor | None = None
    cut: Cut | None = None
    has_spare_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Behind the mixer of a layer only some tokens go on: no layer above can need the others.

    Attributes:
        layer: the decoder layer.
        tokens: int64 [T'], those of the batch that go on, ascending.
        batch: what the layers above are given, or None where no token goes on. Where they keep rows
            of their own, a sequence begins for them with the first token that any of its steps lets
            go on: lengths and block tables leave out what is before it.
    """

    layer: int
    tokens: Tensor
    batch: ForwardBatch | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """A layer's view of the arena.

    Attributes:
        group: index of its group in ForwardBatch.groups.
        tensors: one strided view for each field, in the order of the spec. A field kept per token
            has shape [num_units, block_tokens, *shape] with stride(0) = 256 bytes, so that block
            `block_offsets[b, i]` is `tensors[f][block_offsets[b, i]]`.
    """

    group: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionState:
    """What attention layers need beside the batch: their caches, and each kernel's plan.

    Attributes:
        caches: for each decoder layer its views, or None where the layer keeps nothing. A layer
            that reads another's cache holds the same views as the owner.
        plans: (group index, kernel name) -> what that kernel's `plan()` returned for this batch.
            What a model plans for all layers of a group stands beside it under a name of its own.
        behind_cut: the same for the batch behind the cut, or None where there is none.
    """

    caches: tuple[LayerCache | None, ...]
    plans: Mapping[tuple[int, str], Any]
    behind_cut: AttentionState | None = None
