"""Checkpoints: where a prefix can be resumed although not every row of it is kept.

Used by `core/cache_manager.py` when some group keeps less than everything. At a checkpoint a State
group has a copy of its state, Window and Chunk groups have the rows still visible there. They are
placed at the end of a prompt, where prompts fork, and at the end of a turn, always at multiples of
the grain. They are optional: one that finds no room is not made, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.core.block.abstract import BlockManager
from vllm.core.block_store import BlockStore
from vllm.core.prefix_history import PrefixHistory
from vllm.sequence import SequenceCache
from vllm.step import BlockCopy, find_first_token

FOR_EVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Blocks beyond its need that a step of a sequence would like to have.

    Attributes:
        extra: blocks by group.
        position: where a copy of the states is wanted; None for none.
        kept: by group, skipped entries that should be stored after all.
        kept_until: position of the last mark that `kept` serves.
    """

    extra: tuple[int, ...]
    kept: tuple[frozenset[int], ...]
    position: int | None = None
    kept_until: int = 0

    def add_to(self, needs: Sequence[int]) -> list[int]:
        """Return needs with the wish in them."""
        return [need + extra for need, extra in zip(needs, self.extra, strict=True)]


class CheckpointKeeper:
    """Places, writes, lists and restores checkpoints.

    A copy is made before the step that would overwrite the state, and listed in the prefix index
    when the planning of that step ends: nobody can resume from it in the step that writes it.

    Args:
        group_reaches: by group, the last tokens before a goal that all of its layers compute; None
            where they compute every token.

    Attributes:
        is_active: whether there is anything to do for these groups.
        generation: of the prefix index; sequences of another one leave no checkpoints.
    """

    def __init__(
        self,
        managers: Sequence[BlockManager],
        store: BlockStore,
        grain_tokens: int,
        group_reaches: Sequence[int | None] = (),
    ) -> None:
        self._managers = tuple(managers)
        self._store = store
        self._grain = grain_tokens
        self._reaches = tuple(group_reaches) or (None,) * len(managers)
        self._states = tuple(g for g, m in enumerate(managers) if not m.is_positional)
        self._recent = tuple(
            g for g, m in enumerate(managers) if m.is_positional and not m.needs_whole_prefix
        )
        self.is_active = store.index is not None and bool(self._states or self._recent)
        self._history = PrefixHistory()
        self._copies: list[BlockCopy] = []
        self._forks: dict[tuple[int, int], int] = {}
        self._planned: list[tuple[SequenceCache, int, tuple[int, ...]]] = []
        self._claims: dict[bytes, SequenceCache] = {}
        self.generation = 0

    def mark_prompt(self, cache: SequenceCache, token_ids: Sequence[int], max_tokens: int) -> None:
        """Note where the known tokens of a sequence that may enter deserve checkpoints.

        At the last grain before their end, and where they leave what was seen before.
        """
        if not self.is_active:
            return
        index = self._store.index
        assert index is not None, "it is active only with an index"
        num_grains = max_tokens // self._grain
        index.extend_chain(cache.chain, token_ids, num_grains, cache.salt)
        fork = self._history.match(cache.chain, num_grains)
        grains = {fork, num_grains} - {0}
        cache.goal = len(token_ids)
        cache.trail.marks = tuple(number * self._grain for number in sorted(grains))

    def cut(self, cache: SequenceCache, num_computed: int, num_new: int) -> int:
        """Return how many of `num_new` tokens to compute so that a wanted state can be copied."""
        if self._states:
            for mark in cache.trail.marks:
                if num_computed < mark < num_computed + num_new and self._is_wanted(cache, mark):
                    return mark - num_computed
        return num_new

    def make_wish(self, cache: SequenceCache, num_computed: int, num_new: int) -> Wish | None:
        """Return what a step would like to have beyond its need; changes nothing."""
        if not self.is_active or cache.generation != self.generation:
            return None
        if self._states:
            return self._wish_copy(cache, num_computed)
        return self._wish_rows(cache, num_computed, num_new)

    def make_first_wish(self, cache: SequenceCache, num_computed: int, num_new: int) -> Wish | None:
        """Return what the step with which a sequence enters would like to have."""
        if not self.is_active or self._states:
            return None
        return self._wish_rows(cache, num_computed, num_new)

    def note_entry(self, cache: SequenceCache, restored: Sequence[tuple[int, int]]) -> None:
        """A sequence enters with working blocks; copy the states that it resumes from into them.

        Args:
            cache: of the sequence.
            restored: (group, block) pairs of its prefix hit, held by the caller; those that hold
                states are taken over.
        """
        for group, block in restored:
            if not self._managers[group].is_positional:
                self._copy(group, block, cache.tables[group][0])
                self._store.drop(group, block)
                assert self._store.index is not None, "hits come from the index"
                self._store.index.note_hit(group, block)
        if self.is_active:
            self._history.note(cache.chain)
        ahead = [mark for mark in cache.trail.marks if mark > cache.num_published_tokens]
        cache.goal = min(ahead, default=cache.goal)

    def is_complete(self, cache: SequenceCache, group: int, number: int) -> bool:
        """Whether every layer of a group computes the rows of grain `number` of a sequence."""
        reach = self._reaches[group]
        if reach is None or cache.goal is None:
            return True
        return number * self._grain >= find_first_token(cache.goal, reach, self._grain)

    def finish_growth(self, cache: SequenceCache, end: int, wish: Wish | None) -> int:
        """Take note that a step up to `end` is planned, and grant its wish.

        Returns:
            The length up to which later steps of one token want nothing of a checkpoint.
        """
        if not self.is_active or cache.generation != self.generation:
            return FOR_EVER
        trail = cache.trail
        if trail.kept_until <= cache.num_published_tokens:
            trail.kept_until = 0
        if wish is not None:
            trail.kept_until = wish.kept_until
            self._grant(cache, wish)
        if not self._states:
            return end if trail.kept_until > cache.num_published_tokens else FOR_EVER
        if end in trail.marks:  # nobody else needs to be cut there
            self._claims.setdefault(cache.chain[end // self._grain - 1][0], cache)
        return -(-end // self._grain) * self._grain

    def must_keep(self, cache: SequenceCache) -> bool:
        """Whether dead rows of a sequence stay, because they have yet to be published."""
        return (
            cache.trail.kept_until > cache.num_published_tokens
            and cache.generation == self.generation
        )

    def note_published(self, cache: SequenceCache) -> None:
        """Keys of further grains of a sequence are known."""
        if self.is_active:
            self._history.note(cache.chain[cache.num_published_tokens // self._grain :])
            self._list_written(cache)

    def fork_states(self, cache: SequenceCache) -> dict[int, int] | None:
        """Return a branch's working block by group, copied from its parent's; None without room."""
        if not self._store.arena.fits([int(g in self._states) for g in range(len(self._managers))]):
            return None
        blocks = {group: self._store.allocate(group) for group in self._states}
        for group, block in blocks.items():
            source = cache.tables[group][0]
            self._forks[group, block] = source
            self._store.hold(group, source)
        return blocks

    def finish_step(self, copies: list[BlockCopy]) -> None:
        """End the planning of a step: hand its copies out and list what they will have written."""
        for (group, target), source in self._forks.items():
            copies.append(BlockCopy(group=group, source=source, target=target))
            self._store.drop(group, source)
        self._forks.clear()
        copies.extend(self._copies)
        self._copies.clear()
        for cache, position, blocks in self._planned:
            if cache.tables or position <= len(cache.chain) * self._grain:
                cache.trail.unlisted.append((position, blocks))
                self._list_written(cache)
            else:  # it has left, and its last tokens were never known
                self._drop(blocks)
            if not cache.tables:
                cache.trail.newest = None
        self._planned.clear()

    def leave(self, cache: SequenceCache, token_ids: Sequence[int], num_tokens: int) -> None:
        """A sequence leaves: give its states back, as a checkpoint if they can be one.

        Args:
            cache: of the sequence.
            token_ids: tokens known of it.
            num_tokens: tokens that its states have consumed.
        """
        trail = cache.trail
        if self._states and cache.tables:
            self._hand_over(cache, token_ids, num_tokens)
            for _, blocks in trail.unlisted:
                self._drop(blocks)
            for mark in trail.marks:
                digest = cache.chain[mark // self._grain - 1][0]
                if self._claims.get(digest) is cache:
                    del self._claims[digest]
            for group in self._states:
                block = cache.tables[group].pop()
                source = self._forks.pop((group, block), None)
                if source is not None:
                    self._store.drop(group, source)
                self._store.drop(group, block)
        trail.marks, trail.newest, trail.kept_until = (), None, 0
        trail.unlisted.clear()

    def _hand_over(self, cache: SequenceCache, token_ids: Sequence[int], num_tokens: int) -> None:
        index = self._store.index
        if index is None or cache.generation != self.generation:
            return
        known = min(num_tokens, len(token_ids)) // self._grain
        index.extend_chain(cache.chain, token_ids, known, cache.salt)
        self._list_written(cache)
        if known and known * self._grain == num_tokens and not self._is_fresh(cache):
            blocks = tuple(cache.tables[group][0] for group in self._states)
            if self._list(cache, known - 1, blocks):
                self._forget_newest(cache)

    def _wish_copy(self, cache: SequenceCache, position: int) -> Wish | None:
        if position % self._grain or not position or self._is_fresh(cache):
            return None
        marks = cache.trail.marks
        is_prompt = bool(marks) and position <= marks[-1]
        if is_prompt and position not in marks:
            return None
        if not self._is_wanted(cache, position):
            return None
        extra = tuple(int(g in self._states) for g in range(len(self._managers)))
        return Wish(extra=extra, kept=(frozenset(),) * len(extra), position=position)

    def _wish_rows(self, cache: SequenceCache, num_computed: int, num_new: int) -> Wish | None:
        end = num_computed + num_new
        marks = [mark for mark in cache.trail.marks if num_computed < mark < end]
        if not marks:
            return None
        kept: list[frozenset[int]] = []
        for manager in self._managers:
            entries: set[int] = set()
            first, last = manager.skipped_entries(num_computed, num_new)
            for mark in marks:
                start = max(first, manager.first_resumed_entry(mark))
                entries.update(range(start, min(last, manager.num_entries(mark))))
            kept.append(frozenset(entries))
        extra = tuple(len(entries) for entries in kept)
        return Wish(extra=extra, kept=tuple(kept), kept_until=marks[-1]) if any(extra) else None

    def _grant(self, cache: SequenceCache, wish: Wish) -> None:
        position = wish.position
        if position is None:
            return
        targets = self._take_replaced(cache, position)
        if targets is None:
            if not self._store.arena.fits(wish.extra):
                return
            targets = tuple(self._store.allocate(group) for group in self._states)
        for group, target in zip(self._states, targets, strict=True):
            self._copy(group, cache.tables[group][0], target)
        self._planned.append((cache, position, targets))

    def _is_wanted(self, cache: SequenceCache, position: int) -> bool:
        """Whether nobody has, or is about to write, a checkpoint of this prefix."""
        number = position // self._grain - 1
        if number >= len(cache.chain):
            return True
        digest = cache.chain[number][0]
        index = self._store.index
        assert index is not None, "it is active only with an index"
        if self._claims.get(digest, cache) is not cache:
            return False
        return any(index.entry_at(digest, group) is None for group in self._states)

    def _is_fresh(self, cache: SequenceCache) -> bool:
        """Whether the working blocks are a branch's that get their content in the next step."""
        return any((group, cache.tables[group][0]) in self._forks for group in self._states)

    def _take_replaced(self, cache: SequenceCache, position: int) -> tuple[int, ...] | None:
        """Return the blocks of the last copy made while it generated, which the new one replaces.

        None if there is none, or somebody has resumed from it.
        """
        newest = cache.trail.newest
        if newest is None or position <= newest[0] or not self._is_unused(cache):
            return None
        index = self._store.index
        assert index is not None, "it is active only with an index"
        digest = cache.chain[newest[0] // self._grain - 1][0]
        for group in self._states:
            entry = index.entry_at(digest, group)
            assert entry is not None, "an unused checkpoint is listed"
            self._store.take_over(entry)
        cache.trail.newest = None
        return newest[1]

    def _is_unused(self, cache: SequenceCache) -> bool:
        """Whether the newest copy of a sequence is still listed, in its blocks, for nobody else."""
        newest, index = cache.trail.newest, self._store.index
        if newest is None or index is None:
            return False
        digest = cache.chain[newest[0] // self._grain - 1][0]
        for group, block in zip(self._states, newest[1], strict=True):
            entry = index.entry_at(digest, group)
            if entry is None or entry.block_ids != (block,) or entry.num_held or entry.num_hits:
                return False
        return True

    def _forget_newest(self, cache: SequenceCache) -> None:
        """A checkpoint behind it has been listed: the last one made on the way goes."""
        targets = self._take_replaced(cache, FOR_EVER)
        if targets is not None:
            self._drop(targets)

    def _list_written(self, cache: SequenceCache) -> None:
        """List the copies of a sequence whose planning has ended and whose keys are known."""
        trail = cache.trail
        if not trail.unlisted:
            return
        waiting, trail.unlisted = trail.unlisted, []
        for position, blocks in waiting:
            number = position // self._grain - 1
            if cache.generation != self.generation:
                self._drop(blocks)
            elif number >= len(cache.chain):
                trail.unlisted.append((position, blocks))
            else:
                is_new = self._list(cache, number, blocks)
                self._drop(blocks)
                if is_new and position not in trail.marks:
                    trail.newest = (position, blocks)

    def _list(self, cache: SequenceCache, number: int, blocks: tuple[int, ...]) -> bool:
        is_new = True
        for group, block in zip(self._states, blocks, strict=True):
            is_new &= self._store.register(cache.chain, number, group, (block,))
        return is_new

    def _copy(self, group: int, source: int, target: int) -> None:
        """Plan a copy; both blocks stay where they are until the step is planned."""
        self._copies.append(BlockCopy(group=group, source=source, target=target))
        for block in (source, target):
            self._store.hold(group, block)
            self._store.pin(group, block)

    def _drop(self, blocks: tuple[int, ...]) -> None:
        for group, block in zip(self._states, blocks, strict=True):
            self._store.drop(group, block)
