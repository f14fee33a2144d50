"""The cache of one rank: the arena, each layer's views of it, its bytes before a step.

Made by the worker from the agreed layout and this rank's own cache specs. Block ids come from the
scheduler; this file never decides who owns a block.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from vllm import envs
from vllm._custom_ops.cache import copy_blocks
from vllm.batch import LayerCache
from vllm.cache_spec import (
    BLOCK_ALIGNMENT_BYTES,
    CacheLayout,
    GroupLayout,
    KVCacheGroup,
    LayerCacheSpec,
    State,
    make_group,
)
from vllm.core.block.geometry import plan_superblocks
from vllm.errors import ConfigError, OutOfMemoryError
from vllm.logger import init_logger
from vllm.step import StepPlan
from vllm.utils.tensors import view_cache_field
from vllm.worker.block_table import MAX_ARENA_UNITS, GroupGeometry
from vllm.worker.hybrid_cache import TypeCache, cut_groups, describe_types

logger = init_logger(__name__)

_NAN_BYTE = 0xFF  # all bits set is NaN in every float type


class CacheEngine:
    """Arena, views and byte moves of one rank.

    Attributes:
        groups: the groups with this rank's byte sizes, in the order of the layout.
        geometries: where their blocks lie.
        caches: views of each decoder layer, None where the layer keeps nothing.
        arena: uint8, all superblocks and one more for the pad blocks.
    """

    def __init__(
        self,
        specs: Sequence[LayerCacheSpec],
        layout: CacheLayout,
        device: torch.device,
        *,
        kernel_block_tokens: Sequence[int] = (),
        uncached_types: Sequence[str] = (),
    ) -> None:
        self._kernel_block_tokens = tuple(kernel_block_tokens)
        self._uncached_types = tuple(uncached_types)
        self._specs = tuple(specs)
        self._device = device
        self._is_poisoned: bool = envs.VLLM_POISON_CACHE
        groups = tuple(_size_group(group, specs) for group in layout.groups)
        slots = [group.blocks_per_superblock for group in layout.groups]
        self._lay_out(groups, slots, layout.num_superblocks)

    def _lay_out(
        self, groups: tuple[KVCacheGroup, ...], slots: Sequence[int], num_superblocks: int
    ) -> None:
        """Allocate the arena and bind the layers.

        Args:
            groups: with this rank's byte sizes.
            slots: blocks of each group that a superblock holds.
            num_superblocks: without the one for the pad blocks.
        """
        superblock_bytes = max(
            (count * group.block_bytes for count, group in zip(slots, groups, strict=True)),
            default=BLOCK_ALIGNMENT_BYTES,
        )
        superblock_units = superblock_bytes // BLOCK_ALIGNMENT_BYTES
        num_units = (num_superblocks + 1) * superblock_units
        if num_units > MAX_ARENA_UNITS:
            raise ConfigError(
                f"a cache of {num_units * BLOCK_ALIGNMENT_BYTES} bytes a rank is beyond the "
                f"{MAX_ARENA_UNITS * BLOCK_ALIGNMENT_BYTES} that block offsets reach; give it less"
            )
        self.groups = groups
        self.geometries = tuple(
            GroupGeometry(
                block_tokens=group.block_tokens,
                blocks_per_superblock=count,
                superblock_units=superblock_units,
                block_units=group.block_bytes // BLOCK_ALIGNMENT_BYTES,
                pad_offset=num_superblocks * superblock_units,
                is_per_sequence=isinstance(group.lifetime, State),
            )
            for count, group in zip(slots, groups, strict=True)
        )
        self.arena = allocate_arena(num_units * BLOCK_ALIGNMENT_BYTES, self._device)
        self.caches = _bind_layers(self.arena, groups, self._specs)
        if self._is_poisoned:
            self.arena.fill_(_NAN_BYTE)
        self._num_superblocks = num_superblocks
        self._superblock_bytes = superblock_bytes

    def allocate_hybrid(self, block_size_map: Mapping[str, int]) -> dict[str, TypeCache]:
        """Give each layer type blocks of its own size; a type with size 0 gets none.

        The arena is cut anew, its content lost, if a size differs from what it is: call it before
        the first step. Raises: ConfigError for a type or size that cannot be.
        """
        groups = cut_groups(
            self.groups,
            self._specs,
            block_size_map,
            kernel_block_tokens=self._kernel_block_tokens,
            uncached_types=self._uncached_types,
        )
        if groups != self.groups:
            num_bytes = self.arena.numel()
            geometry = plan_superblocks([group.block_bytes for group in groups], num_bytes // 2)
            num_superblocks = num_bytes // geometry.superblock_bytes - 1
            self._lay_out(groups, geometry.blocks_per_superblock, num_superblocks)
        counts = [g.blocks_per_superblock * self._num_superblocks for g in self.geometries]
        return describe_types(groups, counts, self.caches, self._specs, self._uncached_types)

    def prepare_step(self, plan: StepPlan) -> None:
        """Zero the superblocks that the plan names, then run its copies.

        Under VLLM_POISON_CACHE every block is filled with NaN instead, whenever a sequence gets it
        afresh.
        """
        if self._is_poisoned:
            self._poison_fresh(plan)
        else:
            for superblock in plan.zero_superblocks:
                start = superblock * self._superblock_bytes
                self.arena[start : start + self._superblock_bytes].zero_()
        if plan.copies:
            self._copy_blocks(plan)

    def _poison_fresh(self, plan: StepPlan) -> None:
        for group, block_id in self._list_fresh(plan):
            geometry = self.geometries[group]
            start = geometry.get_offset(block_id) * BLOCK_ALIGNMENT_BYTES
            self.arena[start : start + geometry.block_bytes].fill_(_NAN_BYTE)

    def _list_fresh(self, plan: StepPlan) -> Iterator[tuple[int, int]]:
        """Yield (group, block id) of each block without a valid row before this step's copies."""
        for new in plan.new_rows:
            for group, ids in enumerate(new.block_ids):
                geometry = self.geometries[group]
                num_kept = -(-new.num_computed_tokens // geometry.block_tokens)
                for block_id in ids[0 if geometry.is_per_sequence else num_kept :]:
                    if block_id >= 0:
                        yield group, block_id
        for row in plan.rows:
            for group, ids in enumerate(row.new_block_ids):
                for block_id in ids:
                    if block_id >= 0:
                        yield group, block_id
        for copy in plan.copies:  # a checkpoint is in no table
            yield copy.group, copy.target

    def _copy_blocks(self, plan: StepPlan) -> None:
        for group, geometry in enumerate(self.geometries):
            pairs = [
                (geometry.get_offset(copy.source), geometry.get_offset(copy.target))
                for copy in plan.copies
                if copy.group == group
            ]
            if pairs:
                copies = torch.tensor(pairs, dtype=torch.int64, device="cpu")
                copy_blocks(self.arena, copies, geometry.block_bytes)


def allocate_arena(num_bytes: int, device: torch.device) -> Tensor:
    """Return a zeroed uint8 tensor; on a CPU its pages take no memory until they are written.

    Raises:
        OutOfMemoryError: the address space or the device has no room.
    """
    try:
        if device.type == "cpu":
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)  # blocks are read in jumps: spare the TLB
            return torch.frombuffer(pages, dtype=torch.uint8)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except (OSError, ValueError, OverflowError, torch.OutOfMemoryError) as exc:
        raise OutOfMemoryError(
            f"the cache of {num_bytes} bytes cannot be allocated on {device} ({exc}); give it less "
            "memory (VLLM_CPU_KVCACHE_SPACE, --gpu-memory-utilization) or a shorter --max-model-len"
        ) from exc


def _size_group(group: GroupLayout, specs: Iterable[LayerCacheSpec]) -> KVCacheGroup:
    """Give an agreed group this rank's byte sizes."""
    owned = {spec.layer: spec for spec in specs if spec.reads_from is None}
    missing = [layer for layer in group.layers if layer not in owned]
    if missing:
        raise ConfigError(
            f"the layout puts layers {missing} into group {group.name!r}, but on this rank they "
            "keep no cache of their own; all ranks must serve the same model"
        )
    return make_group(group.name, [owned[layer] for layer in group.layers], group.block_tokens)


def _bind_layers(
    arena: Tensor, groups: Sequence[KVCacheGroup], specs: Sequence[LayerCacheSpec]
) -> tuple[LayerCache | None, ...]:
    caches: dict[int, LayerCache] = {}
    for index, group in enumerate(groups):
        views: dict[int, list[Tensor]] = {}
        for place in group.places:
            view = view_cache_field(
                arena, place.field, place.offset_bytes, group.block_bytes, group.block_tokens
            )
            views.setdefault(place.layer, []).append(view)
        for layer, tensors in views.items():
            caches[layer] = LayerCache(group=index, tensors=tuple(tensors))
    num_layers = 1 + max((spec.layer for spec in specs), default=-1)
    bound: list[LayerCache | None] = [None] * num_layers
    for spec in specs:
        bound[spec.layer] = caches.get(spec.layer if spec.reads_from is None else spec.reads_from)
    return tuple(bound)
