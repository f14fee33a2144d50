"""The byte arena as superblocks: who owns which, which slots are free, cached or held.

Called by `core/cache_manager.py` only. Counts and ids, no bytes and no tensors: block id =
superblock * K_g + slot. A superblock belongs to one group from its first block until it is empty.
It never decides what to evict: it answers what would fit, and does what it is told.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import gt

_NO_OWNER = -1


class SuperblockArena:
    """Ownership of superblocks and reference counts of blocks.

    A slot is free, held (reference count above 0) or cached (count 0, content kept for prefix
    hits). Free slots are taken from the fullest superblock of the group, so that emptier ones
    drain.

    Attributes:
        blocks_per_superblock: K_g of each group.
        num_superblocks: superblocks in the arena.
        num_free_slots: for each group, free slots in superblocks it owns.
        num_reclaimable: for each group, slots that are not held in superblocks with a held one:
            what the group could use there if everything cached were evicted.
        num_releases: how often a block has lost its last holder.
    """

    def __init__(self, blocks_per_superblock: Sequence[int], num_superblocks: int) -> None:
        self.blocks_per_superblock = tuple(blocks_per_superblock)
        self.num_superblocks = num_superblocks
        num_groups = len(self.blocks_per_superblock)
        self.num_free_slots = [0] * num_groups
        self.num_reclaimable = [0] * num_groups
        self.num_releases = 0
        self._num_owned = [0] * num_groups
        self._num_held = [0] * num_groups
        self._free = list(range(num_superblocks - 1, -1, -1))
        self._owner = [_NO_OWNER] * num_superblocks
        self._last_owner = [_NO_OWNER] * num_superblocks
        self._used = [0] * num_superblocks
        self._held = [0] * num_superblocks
        self._slots: list[list[int]] = [[] for _ in range(num_superblocks)]
        self._refs = [[0] * (k * num_superblocks) for k in self.blocks_per_superblock]
        # Superblocks with free slots, by number of used ones; bit u of a mask: bucket u is filled.
        self._buckets: list[list[dict[int, None]]] = [
            [{} for _ in range(k)] for k in self.blocks_per_superblock
        ]
        self._bucket_masks = [0] * num_groups
        self._changed_owner: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()  # its first is found in constant time

    @property
    def num_idle(self) -> int:
        """Superblocks that are owned but have only cached or free slots."""
        return len(self._idle)

    @property
    def num_free_superblocks(self) -> int:
        """Superblocks that belong to no group."""
        return len(self._free)

    def num_owned_superblocks(self, group: int) -> int:
        """Superblocks that belong to a group."""
        return self._num_owned[group]

    def num_held_blocks(self, group: int) -> int:
        """Blocks of a group with a reference."""
        return self._num_held[group]

    def num_cached_blocks(self, group: int) -> int:
        """Blocks of a group whose content is kept although nobody holds them."""
        slots = self._num_owned[group] * self.blocks_per_superblock[group]
        return slots - self.num_free_slots[group] - self._num_held[group]

    def ref_count(self, group: int, block: int) -> int:
        """References to a block."""
        return self._refs[group][block]

    def take_changed_owner(self) -> list[int]:
        """Return superblocks whose bytes were another group's, once each; they must be zeroed."""
        changed = self._changed_owner
        if changed:
            self._changed_owner = []
        return changed

    def fits(self, needs: Sequence[int]) -> bool:
        """Whether new blocks (count for each group) can be had from free slots and superblocks."""
        superblocks = 0
        for group, need in enumerate(needs):
            missing = need - self.num_free_slots[group]
            if missing > 0:
                superblocks += -(-missing // self.blocks_per_superblock[group])
        return superblocks <= len(self._free)

    def fits_after_eviction(self, needs: Sequence[int]) -> bool:
        """Whether new blocks could be had if everything cached were evicted."""
        superblocks = 0
        for group, need in enumerate(needs):
            missing = need - self.num_reclaimable[group]
            if missing > 0:
                superblocks += -(-missing // self.blocks_per_superblock[group])
        return superblocks <= len(self._free) + len(self._idle)

    def takes_last_superblocks(self, needs: Sequence[int]) -> bool:
        """Whether `needs` would claim one of the last superblocks that several groups share.

        The next newcomer may need one for a group that owns no free slot.
        """
        num_groups = len(self.num_free_slots)
        if num_groups == 1 or len(self._free) > 2 * num_groups:
            return False
        return any(map(gt, needs, self.num_free_slots))

    def allocate(self, group: int) -> int:
        """Return a free block of a group with one reference.

        The caller has asked `fits` before; IndexError if there is no room.
        """
        mask = self._bucket_masks[group]
        if mask:
            used = mask.bit_length() - 1
            superblock = next(reversed(self._buckets[group][used]))
            self._leave_bucket(group, superblock, used)
            self.num_free_slots[group] -= 1
        else:
            used = 0
            superblock = self._claim(group)
        block = superblock * self.blocks_per_superblock[group] + self._slots[superblock].pop()
        self._used[superblock] = used + 1
        if used + 1 < self.blocks_per_superblock[group]:
            self._enter_bucket(group, superblock, used + 1)
        self._refs[group][block] = 1
        self._count_hold(group, superblock)
        return block

    def hold(self, group: int, block: int) -> bool:
        """Add a reference; return whether it is the first (the block was cached)."""
        refs = self._refs[group]
        refs[block] += 1
        if refs[block] > 1:
            return False
        self._count_hold(group, block // self.blocks_per_superblock[group])
        return True

    def release(self, group: int, block: int) -> bool:
        """Drop a reference; return whether it was the last.

        The block is cached then; the caller frees it with `reclaim` unless its content is wanted.
        """
        refs = self._refs[group]
        assert refs[block] > 0, f"block {block} of group {group} was released twice"
        refs[block] -= 1
        if refs[block]:
            return False
        superblock = block // self.blocks_per_superblock[group]
        held = self._held[superblock] = self._held[superblock] - 1
        self._num_held[group] -= 1
        self.num_releases += 1
        if held:
            self.num_reclaimable[group] += 1
        else:
            self.num_reclaimable[group] -= self.blocks_per_superblock[group] - 1
            self._idle[superblock] = None
        return True

    def reclaim(self, group: int, block: int) -> None:
        """Free a cached block; an empty superblock returns to the shared budget."""
        num_slots = self.blocks_per_superblock[group]
        superblock, slot = divmod(block, num_slots)
        assert self._refs[group][block] == 0, f"block {block} of group {group} is held"
        used = self._used[superblock]
        if used < num_slots:
            self._leave_bucket(group, superblock, used)
        self._used[superblock] = used - 1
        if used > 1:
            self._slots[superblock].append(slot)
            self._enter_bucket(group, superblock, used - 1)
            self.num_free_slots[group] += 1
            return
        self._slots[superblock].clear()
        self.num_free_slots[group] -= num_slots - 1
        del self._idle[superblock]
        self._num_owned[group] -= 1
        self._owner[superblock] = _NO_OWNER
        self._free.append(superblock)

    def touch(self, group: int, block: int) -> None:
        """Count a use of a cached block: an idle superblock becomes the one left last."""
        superblock = self.superblock_of(group, block)
        if superblock in self._idle:
            self._idle.move_to_end(superblock)

    def idle_superblocks(self) -> Iterator[tuple[int, int]]:
        """Yield (superblock, its group) of those without a held block, the one left first first."""
        for superblock in self._idle:
            yield superblock, self._owner[superblock]

    def blocks_of(self, group: int, superblock: int) -> range:
        """Return the ids of a group's blocks in a superblock."""
        num_slots = self.blocks_per_superblock[group]
        return range(superblock * num_slots, (superblock + 1) * num_slots)

    def superblock_of(self, group: int, block: int) -> int:
        """Return the superblock in which a block lies."""
        return block // self.blocks_per_superblock[group]

    def superblock_counts(self, superblock: int) -> tuple[int, int]:
        """Return (used slots, held slots) of a superblock."""
        return self._used[superblock], self._held[superblock]

    def _claim(self, group: int) -> int:
        superblock = self._free.pop()
        num_slots = self.blocks_per_superblock[group]
        self._owner[superblock] = group
        if self._last_owner[superblock] != group:
            if self._last_owner[superblock] != _NO_OWNER:
                self._changed_owner.append(superblock)
            self._last_owner[superblock] = group
        self._slots[superblock].extend(range(num_slots - 1, -1, -1))
        self._num_owned[group] += 1
        self.num_free_slots[group] += num_slots - 1
        self._idle[superblock] = None
        return superblock

    def _count_hold(self, group: int, superblock: int) -> None:
        held = self._held[superblock]
        self._held[superblock] = held + 1
        self._num_held[group] += 1
        if held:
            self.num_reclaimable[group] -= 1
        else:
            del self._idle[superblock]
            self.num_reclaimable[group] += self.blocks_per_superblock[group] - 1

    def _enter_bucket(self, group: int, superblock: int, used: int) -> None:
        self._buckets[group][used][superblock] = None
        self._bucket_masks[group] |= 1 << used

    def _leave_bucket(self, group: int, superblock: int, used: int) -> None:
        bucket = self._buckets[group][used]
        del bucket[superblock]
        if not bucket:
            self._bucket_masks[group] &= ~(1 << used)


class ArenaShadow:
    """What the arena would be after some evictions and holds; the arena itself stays as it is.

    Used to choose victims: every change can be taken back, and dropping the object drops them all.
    """

    def __init__(self, arena: SuperblockArena) -> None:
        self._arena = arena
        self._free_slots = list(arena.num_free_slots)
        self._reclaimable = list(arena.num_reclaimable)
        self._num_idle = arena.num_idle
        self._num_free = arena.num_free_superblocks
        self._counts: dict[int, tuple[int, int]] = {}

    def hold(self, group: int, block: int) -> None:
        """Suppose that a cached block gets its first reference."""
        superblock, used, held = self._look_up(group, block)
        if held:
            self._reclaimable[group] -= 1
        else:
            self._num_idle -= 1
            self._reclaimable[group] += self._arena.blocks_per_superblock[group] - 1
        self._counts[superblock] = (used, held + 1)

    def evict(self, group: int, block: int) -> None:
        """Suppose that a cached block is freed."""
        superblock, used, held = self._look_up(group, block)
        if used == 1:
            self._free_slots[group] -= self._arena.blocks_per_superblock[group] - 1
            self._num_idle -= 1
            self._num_free += 1
        else:
            self._free_slots[group] += 1
        self._counts[superblock] = (used - 1, held)

    def restore(self, group: int, block: int) -> None:
        """Take back the supposed eviction of a block."""
        superblock, used, held = self._look_up(group, block)
        if used == 0:
            self._free_slots[group] += self._arena.blocks_per_superblock[group] - 1
            self._num_idle += 1
            self._num_free -= 1
        else:
            self._free_slots[group] -= 1
        self._counts[superblock] = (used + 1, held)

    def idle_superblocks(self) -> Iterator[tuple[int, range]]:
        """Yield (group, block ids) of superblocks without a held block, the one left first first.

        Not those in which a block is supposed to be held.
        """
        for superblock, group in self._arena.idle_superblocks():
            if superblock not in self._counts or not self._counts[superblock][1]:
                yield group, self._arena.blocks_of(group, superblock)

    @property
    def is_divided(self) -> bool:
        """Whether superblocks of some group have several blocks."""
        return max(self._arena.blocks_per_superblock) > 1

    def blocks_beside(self, group: int, block: int) -> range:
        """Return the ids of the blocks in a block's superblock, its own among them."""
        return self._arena.blocks_of(group, self._arena.superblock_of(group, block))

    def lacks_slots(self, group: int, need: int) -> bool:
        """Whether a group has less than `need` free slots in superblocks it owns."""
        return need > self._free_slots[group]

    def is_shared(self, group: int, block: int) -> bool:
        """Whether a block lies in a superblock with a held one, which no eviction can empty."""
        return self._look_up(group, block)[2] > 0

    def fits(self, needs: Sequence[int]) -> bool:
        """Whether new blocks can be had after what is supposed so far."""
        return self._missing_superblocks(needs, self._free_slots) <= self._num_free

    def fits_after_eviction(self, needs: Sequence[int]) -> bool:
        """Whether new blocks could be had if everything cached were evicted as well."""
        missing = self._missing_superblocks(needs, self._reclaimable)
        return missing <= self._num_free + self._num_idle

    def _missing_superblocks(self, needs: Sequence[int], slots: Sequence[int]) -> int:
        return sum(
            -(-(need - slots[group]) // self._arena.blocks_per_superblock[group])
            for group, need in enumerate(needs)
            if need > slots[group]
        )

    def _look_up(self, group: int, block: int) -> tuple[int, int, int]:
        superblock = self._arena.superblock_of(group, block)
        used, held = self._counts.get(superblock) or self._arena.superblock_counts(superblock)
        return superblock, used, held
