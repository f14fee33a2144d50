"""The KV cache as the scheduler sees it: one face over all groups.

Called by `core/scheduler.py`. It matches prefixes, grows and frees the block tables of sequences,
and evicts cached blocks when room is needed. Every call either does all it was asked or leaves no
trace. It never preempts a sequence and knows no budget; block ids are its only output.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from vllm.cache_spec import CacheLayout, Full, KVCacheGroup
from vllm.core.block.arena import SuperblockArena
from vllm.core.block.table import make_block_managers
from vllm.core.block_store import BlockStore
from vllm.core.checkpoint import CheckpointKeeper, Wish
from vllm.core.need import count_fresh, count_superblocks, peak_blocks
from vllm.core.placement import Admission, AdmissionDemand, plan_admission
from vllm.core.prefix_index import NO_HIT, PrefixHit, PrefixIndex, describe_geometry
from vllm.core.report import GroupUsage, describe_groups
from vllm.sequence import NO_BLOCK, SequenceCache
from vllm.step import BlockCopy

DEFAULT_GRAIN_TOKENS = 64
NO_GENERATION = -1
"""Generation of a sequence whose content is not offered to the prefix index."""

NewBlocks = tuple[list[int], ...]


class CacheManager:
    """Block tables, prefix hits and eviction for a list of groups over one arena.

    Attributes:
        num_query_tokens: prompt tokens looked up in the prefix index so far.
        num_hit_tokens: those that were found.
        grain_tokens: h, tokens of the smallest cached unit.
        no_blocks: one empty list for each group; what a row gets that needs no new block.
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        layout: CacheLayout,
        *,
        enable_prefix_caching: bool,
        group_reaches: Sequence[int | None] = (),
        grain_tokens: int = DEFAULT_GRAIN_TOKENS,
    ) -> None:
        self._layout = layout
        self._managers = make_block_managers(groups)
        self._groups = range(len(self._managers))
        self.arena = SuperblockArena(
            [group.blocks_per_superblock for group in layout.groups], layout.num_superblocks
        )
        grain = math.lcm(*(m.block_tokens for m in self._managers if m.is_positional))
        if not all(isinstance(group.lifetime, Full) for group in groups):
            grain = math.lcm(grain, grain_tokens)
        self._index = (
            PrefixIndex(self._managers, geometry=describe_geometry(groups), grain_tokens=grain)
            if enable_prefix_caching
            else None
        )
        self._store = BlockStore(self.arena, self._index)
        self._checkpoints = CheckpointKeeper(self._managers, self._store, grain, group_reaches)
        self.grain_tokens = grain
        # Windows hold the old rows and the new ones in a step: shorter steps need less.
        has_windows = any(m.is_positional and not m.needs_whole_prefix for m in self._managers)
        self._least_chunk = grain if has_windows else sys.maxsize
        self._generation = 0
        self.no_blocks: NewBlocks = tuple([] for _ in groups)
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    @property
    def has_prefix_index(self) -> bool:
        """Whether prefixes are cached."""
        return self._index is not None

    @property
    def usage(self) -> float:
        """Share of the arena that running sequences hold; cached blocks are not counted."""
        held = sum(
            self.arena.num_held_blocks(g) / self.arena.blocks_per_superblock[g]
            for g in self._groups
        )
        return held / max(1, self.arena.num_superblocks)

    def group_usage(self) -> tuple[GroupUsage, ...]:
        """Return where the blocks of each group are."""
        return describe_groups(self._layout, self.arena)

    def fits_empty(self, num_tokens: int, max_chunk: int) -> bool:
        """Whether one sequence of `num_tokens` cache rows fits when nothing else is there."""
        needs = peak_blocks(self._managers, num_tokens, max_chunk)
        return count_superblocks(needs, self.arena.blocks_per_superblock) <= (
            self.arena.num_superblocks
        )

    def match(self, cache: SequenceCache, token_ids: Sequence[int], max_tokens: int) -> PrefixHit:
        """Return the longest cached prefix of at most `max_tokens`; changes nothing."""
        if self._index is None:
            return NO_HIT
        self._checkpoints.mark_prompt(cache, token_ids, max_tokens)
        nodes = self._index.match(cache.chain, token_ids, max_tokens, cache.salt)
        if not nodes:
            return NO_HIT
        return PrefixHit(num_tokens=len(nodes) * self.grain_tokens, nodes=tuple(nodes))

    def record_query(self, num_tokens: int, hit: PrefixHit) -> None:
        """Count an admitted prompt in the hit statistics."""
        if self._index is not None:
            self.num_query_tokens += num_tokens
            self.num_hit_tokens += hit.num_tokens

    def cut_chunk(self, cache: SequenceCache, num_computed: int, num_new: int) -> int:
        """Return how many of `num_new` tokens to compute in one step.

        Less than all where a checkpoint is wanted, or where windows find room for a few at a time.
        """
        num_new = self._checkpoints.cut(cache, num_computed, num_new)
        if self._least_chunk < num_new and cache.tables:
            self._give_back_dead(cache, num_computed)
            lens = [len(table) for table in cache.tables]
            while num_new > self._least_chunk and not self.arena.fits_after_eviction(
                count_fresh(self._managers, lens, num_computed, num_new)
            ):
                num_new = max(self._least_chunk, num_new // 2)
        return num_new

    def growth_blocks(self, num_tokens: int) -> list[int]:
        """Return, for each group, blocks enough for `num_tokens` more tokens in all."""
        return [manager.growth_entries(num_tokens) for manager in self._managers]

    def plan_admission(
        self,
        cache: SequenceCache,
        hit: PrefixHit,
        num_new: int,
        *,
        goal_tokens: int,
        max_chunk: int,
        reserve: Sequence[int],
    ) -> Admission | None:
        """Find room for a new sequence, as `core/placement.py` says; nothing changes."""
        while True:
            demand = AdmissionDemand(
                hit=hit,
                num_new=num_new,
                goal_tokens=goal_tokens,
                max_chunk=min(max_chunk, self._least_chunk),
                reserve=reserve,
                wish=self._checkpoints.make_first_wish(cache, hit.num_tokens, num_new),
            )
            admission = plan_admission(self._managers, self.arena, self._index, demand)
            if admission is not None or num_new <= self._least_chunk:
                return admission
            num_new = max(self._least_chunk, num_new // 2)

    def commit_admission(
        self, cache: SequenceCache, admission: Admission, *, may_publish: bool = True
    ) -> None:
        """Give an empty cache the blocks of its prefix hit and of its first step.

        Without `may_publish` its content is never cached, so that blocks it gives back are free.
        """
        num_computed = admission.num_computed
        for group, block in admission.shared:
            self._store.hold(group, block)
        self._store.evict(admission.victims)
        cache.tables = admission.tables
        cache.num_dead = [
            manager.first_resumed_entry(num_computed) if num_computed else 0
            for manager in self._managers
        ]
        cache.num_published_tokens = num_computed
        cache.generation = self._generation if may_publish else NO_GENERATION
        wish = admission.wish if may_publish else None
        self._grow(cache, num_computed, admission.num_new, wish)
        self._checkpoints.note_entry(cache, admission.shared)

    def extend(
        self, cache: SequenceCache, num_computed: int, num_new: int, copies: list[BlockCopy]
    ) -> NewBlocks | None:
        """Grow the tables of a sequence for a step of `num_new` tokens after `num_computed`.

        Blocks that no later step reads are given back first. Copies that a fork asked for are added
        to `copies`.

        Returns:
            The entries appended to each group's table, or None, with nothing changed, if there is
            no room even after eviction.
        """
        self._give_back_dead(cache, num_computed)
        lens = [len(table) for table in cache.tables]
        needs = count_fresh(self._managers, lens, num_computed, num_new)
        for group, sources in enumerate(cache.copy_sources):
            needs[group] -= sum(
                block == NO_BLOCK or not self._store.must_copy(group, block) for block in sources
            )
        wish = self._checkpoints.make_wish(cache, num_computed, num_new)
        if wish is not None:
            victims = self._store.find_room(wish.add_to(needs))
            wish = None if victims is None else wish
        if wish is None:
            victims = self._store.find_room(needs)
        if victims is None:
            return None
        self._store.evict(victims)
        if cache.copy_sources:
            self._take_sources(cache, copies)
        self._grow(cache, num_computed, num_new, wish)
        return tuple(table[old:] for table, old in zip(cache.tables, lens, strict=True))

    def publish(self, cache: SequenceCache, token_ids: Sequence[int], num_tokens: int) -> None:
        """Offer the full grains among the first `num_tokens`, all computed, to the prefix index."""
        index = self._index
        if index is None or cache.generation != self._generation:
            return
        grain = self.grain_tokens
        first, last = cache.num_published_tokens // grain, num_tokens // grain
        index.extend_chain(cache.chain, token_ids, last, cache.salt)
        self._checkpoints.note_published(cache)
        self._republish(cache)
        for number in range(first, last):
            if not self._register(cache, number):
                cache.duplicates.append(number)
        cache.num_published_tokens = last * grain

    def withhold(self, cache: SequenceCache) -> None:
        """Offer nothing more of a sequence to the prefix index: its content may be wrong."""
        cache.generation = NO_GENERATION

    def fork(self, cache: SequenceCache, num_tokens: int) -> SequenceCache | None:
        """Return a cache that shares the first `num_tokens` rows of `cache`.

        Full grains are shared for good; blocks of a partial last grain are copied when the branch
        first grows, so that no block ever belongs to two grains. None if some group cannot be
        shared; the branch then starts without a cache.
        """
        if not all(m.is_append_only or not m.is_positional for m in self._managers):
            return None
        states = self._checkpoints.fork_states(cache)
        if states is None:
            return None
        num_shared = num_tokens // self.grain_tokens * self.grain_tokens
        tables: list[list[int]] = []
        sources: list[list[int]] = []
        for group, manager in enumerate(self._managers):
            if not manager.is_positional:
                tables.append([states[group]])
                sources.append([])
                continue
            first, last = manager.num_entries(num_shared), manager.num_entries(num_tokens)
            table = cache.tables[group][:last]
            for position in range(manager.first_mortal_entry, manager.num_dead_entries(num_tokens)):
                table[position] = NO_BLOCK
            for block in table:
                if block != NO_BLOCK:
                    self._store.hold(group, block)
            tables.append(table[:first])
            sources.append(table[first:])
        num_published = min(cache.num_published_tokens, num_shared)
        return SequenceCache(
            salt=cache.salt,
            tables=tables,
            num_dead=[manager.num_dead_entries(num_tokens) for manager in self._managers],
            copy_sources=sources if any(sources) else [],
            generation=cache.generation,
            num_published_tokens=num_published,
            chain=cache.chain[: num_tokens // self.grain_tokens],
            duplicates=[
                d for d in cache.duplicates if (d + 1) * self.grain_tokens <= num_published
            ],
            goal=cache.goal,
        )

    def free(
        self, cache: SequenceCache, token_ids: Sequence[int] = (), num_tokens: int = 0
    ) -> None:
        """Give back everything a sequence holds, its end first; its chain of keys stays.

        Args:
            cache: of the sequence.
            token_ids: tokens known of it.
            num_tokens: tokens that it has computed.
        """
        self._checkpoints.leave(cache, token_ids, num_tokens)
        self._republish(cache)
        for group, sources in enumerate(cache.copy_sources):
            for block in sources:
                if block != NO_BLOCK:
                    self._store.drop(group, block)
        duplicates = set(cache.duplicates)
        num_tokens = max(
            (
                len(table) * manager.block_tokens
                for manager, table in zip(self._managers, cache.tables, strict=False)
            ),
            default=0,
        )
        for number in range(-(-num_tokens // self.grain_tokens) - 1, -1, -1):
            for group, table in enumerate(cache.tables):
                per_grain = self.grain_tokens // self._managers[group].block_tokens
                for block in reversed(table[number * per_grain : (number + 1) * per_grain]):
                    if block != NO_BLOCK:
                        self._store.drop(group, block)
            if number in duplicates and self._index is not None:
                self._store.touch(cache.chain[number][0])
        self._store.free_useless()
        cache.tables = []
        cache.num_dead = []
        cache.copy_sources = []
        cache.duplicates = []
        cache.stable_tokens = 0
        cache.num_published_tokens = 0

    def finish_step(self, copies: list[BlockCopy]) -> list[int]:
        """End the planning of a step; return the superblocks that must be zeroed before it runs.

        Copies that no `extend` has added so far are added to `copies`.
        """
        self._checkpoints.finish_step(copies)
        self._store.unpin()
        return self.arena.take_changed_owner()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; what running sequences hold stays theirs, uncached."""
        self._generation += 1
        self._checkpoints.generation = self._generation
        if self._index is not None:
            for entry in self._index.clear():
                self._store.free_entry(entry)

    def _grow(
        self, cache: SequenceCache, num_computed: int, num_new: int, wish: Wish | None
    ) -> None:
        """Append the entries of a step to every table; there is room."""
        total = num_computed + num_new
        stable = []
        for group, manager in enumerate(self._managers):
            table = cache.tables[group]
            skip_start, skip_end = manager.skipped_entries(num_computed, num_new)
            kept = wish.kept[group] if wish is not None else ()
            for position in range(len(table), manager.num_entries(total)):
                if skip_start <= position < skip_end and position not in kept:
                    table.append(NO_BLOCK)
                else:
                    table.append(self._store.allocate(group))
            stable.append(manager.stable_tokens(num_computed, num_new))
        stable.append(self._checkpoints.finish_growth(cache, total, wish))
        cache.stable_tokens = min(stable)

    def _give_back_dead(self, cache: SequenceCache, num_computed: int) -> None:
        if self._checkpoints.must_keep(cache):
            return
        for group, manager in enumerate(self._managers):
            table = cache.tables[group]
            end = min(manager.num_dead_entries(num_computed), len(table))
            for position in range(max(cache.num_dead[group], manager.first_mortal_entry), end):
                if table[position] != NO_BLOCK:
                    self._store.drop(group, table[position])
                    table[position] = NO_BLOCK
            cache.num_dead[group] = max(cache.num_dead[group], end)

    def _take_sources(self, cache: SequenceCache, copies: list[BlockCopy]) -> None:
        """Append the blocks that a fork left to copy; sources are pinned until `finish_step`."""
        for group, sources in enumerate(cache.copy_sources):
            for source in sources:
                block = source
                if source != NO_BLOCK and self._store.must_copy(group, source):
                    block = self._store.allocate(group)
                    copies.append(BlockCopy(group=group, source=source, target=block))
                    self._store.pin(group, source)
                cache.tables[group].append(block)
        cache.copy_sources = []

    def _register(self, cache: SequenceCache, number: int) -> bool:
        """Offer one grain; False if the index has the content in other blocks for some group."""
        is_new = True
        for group, manager in enumerate(self._managers):
            if manager.is_positional and self._checkpoints.is_complete(cache, group, number):
                per_grain = self.grain_tokens // manager.block_tokens
                table = tuple(cache.tables[group][number * per_grain : (number + 1) * per_grain])
                if table.count(NO_BLOCK) < per_grain:
                    is_new &= self._store.register(cache.chain, number, group, table)
        return is_new

    def _republish(self, cache: SequenceCache) -> None:
        """Take over grains whose first owner was evicted, so that what follows stays reachable."""
        if cache.generation != self._generation:
            cache.duplicates = []
        if cache.duplicates:
            cache.duplicates = [d for d in cache.duplicates if not self._register(cache, d)]
