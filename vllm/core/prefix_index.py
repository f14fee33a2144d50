"""Prefix index: which blocks hold the cache rows of which token prefix.

Called by `core/cache_manager.py` only. A token history is cut into grains of h tokens; each full
grain has a key that chains everything before it (SHA-256), and every group registers its blocks of
the grain under that key. It counts no references and frees nothing: it says what can be resumed,
keeps the order of eviction, and hands out victims.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass

from vllm.cache_spec import KVCacheGroup
from vllm.core.block.abstract import BlockManager
from vllm.core.eviction_order import EvictionOrder
from vllm.core.prefix_entry import PrefixEntry, PrefixNode
from vllm.sequence import NO_BLOCK

ChainKey = tuple[bytes, bytes]
"""(digest of the history up to the end of a grain, the grain's own tokens as bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """A cached prefix that a sequence can resume from; valid until the index next changes.

    Attributes:
        num_tokens: its length, a multiple of the grain.
        nodes: its grains; None where nothing of a grain is cached and no group needs it.
    """

    num_tokens: int = 0
    nodes: tuple[PrefixNode | None, ...] = ()


NO_HIT = PrefixHit()


def resumed_tables(
    managers: Sequence[BlockManager], hit: PrefixHit, grain_tokens: int
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Return the block tables that a hit gives, and the (group, block) pairs it needs.

    Those are the blocks in the tables, and the copies that groups with one block for a whole
    sequence resume from; the tables of such groups stay empty.
    """
    tables: list[list[int]] = [[] for _ in managers]
    shared: list[tuple[int, int]] = []
    if not hit.num_tokens:
        return tables, shared
    for group, manager in enumerate(managers):
        if not manager.is_positional:
            last = hit.nodes[-1]
            entry = last.entries[group] if last else None
            assert entry is not None, "a hit is where every group can resume"
            shared.append((group, entry.block_ids[0]))
            continue
        table = tables[group]
        per_grain = grain_tokens // manager.block_tokens
        for node in hit.nodes:
            entry = node.entries[group] if node else None
            table.extend(entry.table if entry else [NO_BLOCK] * per_grain)
        first = manager.first_resumed_entry(hit.num_tokens)
        for position in range(manager.first_mortal_entry, first):
            table[position] = NO_BLOCK
        shared.extend((group, block) for block in table if block != NO_BLOCK)
    return tables, shared


def describe_geometry(groups: Sequence[KVCacheGroup]) -> bytes:
    """Return what a cached row depends on beside its tokens: layers, shapes, dtypes, windows."""
    parts = [
        f"{group.name}|{group.lifetime}|{group.block_tokens}|"
        + ";".join(
            f"{place.layer}.{place.field.name}{place.field.shape}{place.field.dtype.value}"
            for place in group.places
        )
        for group in groups
    ]
    return "\n".join(parts).encode()


class PrefixIndex:
    """Chain keys, nodes, and the order of eviction.

    The order is least recently used first, and among blocks used last by the same sequence the
    deepest first, because a sequence gives its blocks back from its end to its start.

    Attributes:
        grain_tokens: h, a multiple of every group's block_tokens.
    """

    def __init__(
        self, managers: Sequence[BlockManager], *, geometry: bytes, grain_tokens: int
    ) -> None:
        self.grain_tokens = grain_tokens
        self._managers = tuple(managers)
        self._geometry = geometry
        self._roots: dict[str, bytes] = {}
        self._nodes: dict[bytes, PrefixNode] = {}
        self._entry_of: list[dict[int, PrefixEntry]] = [{} for _ in managers]
        self._evictable: OrderedDict[PrefixEntry, None] = OrderedDict()
        self._children: defaultdict[bytes, dict[PrefixNode, None]] = defaultdict(dict)
        self._beside: list[OrderedDict[PrefixEntry, None]] = [OrderedDict() for _ in managers]
        self._order = EvictionOrder(managers, self._children)

    def extend_chain(
        self, chain: list[ChainKey], token_ids: Sequence[int], num_grains: int, salt: str
    ) -> None:
        """Append keys to `chain` until it has `num_grains`; `token_ids` holds all their tokens."""
        grain = self.grain_tokens
        digest = chain[-1][0] if chain else self._root(salt)
        for index in range(len(chain), num_grains):
            tokens = array("i", token_ids[index * grain : (index + 1) * grain]).tobytes()
            digest = hashlib.sha256(digest + tokens).digest()
            chain.append((digest, tokens))

    def match(
        self, chain: list[ChainKey], token_ids: Sequence[int], max_tokens: int, salt: str
    ) -> list[PrefixNode | None]:
        """Return the grains of the longest prefix at which every group can resume.

        `chain` is extended as far as the search went. One walk up finds the runs of each group's
        entries, one scan down takes the first position that satisfies all. A grain of which nothing
        is cached is None; that happens only where no group needs it.
        """
        grain = self.grain_tokens
        num_groups = len(self._managers)
        whole = [g for g, manager in enumerate(self._managers) if manager.needs_whole_prefix]
        nodes: list[PrefixNode | None] = []
        run_starts: list[tuple[int, ...]] = []
        starts = [0] * num_groups
        head_runs = [0] * num_groups
        for index in range(max_tokens // grain):
            if index == len(chain):
                self.extend_chain(chain, token_ids, index + 1, salt)
            digest, tokens = chain[index]
            node = self._nodes.get(digest)
            if node is not None and node.tokens != tokens:
                node = None
            if whole and (node is None or any(node.entries[g] is None for g in whole)):
                break
            end = (index + 1) * grain
            for group, manager in enumerate(self._managers):
                entry = node.entries[group] if node is not None else None
                if entry is None:
                    starts[group] = end
                    continue
                if head_runs[group] == end - grain:
                    head_runs[group] += min(grain, entry.num_leading * manager.block_tokens)
                if len(entry.block_ids) < len(entry.table):
                    starts[group] = end - entry.num_trailing * manager.block_tokens
            nodes.append(node)
            run_starts.append(tuple(starts))
        for index in range(len(nodes) - 1, -1, -1):
            position = (index + 1) * grain
            if all(
                manager.can_resume(position, start, min(head, position))
                for manager, start, head in zip(
                    self._managers, run_starts[index], head_runs, strict=True
                )
            ):
                return nodes[: index + 1]
        return []

    def needs_parent(self, group: int) -> bool:
        """Whether an entry of a group is of no use without the entry of the grain before."""
        return self._managers[group].needs_whole_prefix

    def register(
        self, chain: Sequence[ChainKey], number: int, group: int, table: tuple[int, ...]
    ) -> bool:
        """Record held blocks as a group's content of grain `number` of a chain.

        Args:
            chain: keys of the history, at least up to the grain.
            number: of the grain.
            group: whose content it is.
            table: block ids by position inside the grain, at least one of them stored.

        Returns:
            False if the group already has content there, in these or other blocks.
        """
        digest, tokens = chain[number]
        parent = chain[number - 1][0] if number else b""
        node = self._nodes.get(digest)
        if node is not None and node.entries[group] is not None:
            return False
        if node is None:
            node = PrefixNode(digest, parent, tokens, len(self._managers))
            self._nodes[digest] = node
            self._children[parent][node] = None
            self._order.note_change(self._nodes.get(parent))
        entry = node.entries[group] = PrefixEntry(node, group, table)
        self._order.note_change(node)
        entry_of = self._entry_of[group]
        for block in entry.block_ids:
            entry_of[block] = entry
        return True

    def displace(
        self, chain: Sequence[ChainKey], number: int, group: int, table: tuple[int, ...]
    ) -> PrefixEntry | None:
        """Forget what a group has of a grain if `table` has all of that and more.

        Returns:
            The forgotten entry; the caller frees its blocks that nobody holds.
        """
        node = self._nodes.get(chain[number][0])
        entry = node.entries[group] if node is not None else None
        if entry is None or len(entry.block_ids) == len(entry.table):
            return None
        pairs = zip(entry.table, table, strict=True)
        stored = sum(block != NO_BLOCK for block in table)
        if stored <= len(entry.block_ids) or any(
            old != NO_BLOCK and new == NO_BLOCK for old, new in pairs
        ):
            return None
        self._evictable.pop(entry, None)
        self._forget(entry)
        return entry

    def entry_at(self, digest: bytes, group: int) -> PrefixEntry | None:
        """Return what a group has stored of a grain."""
        node = self._nodes.get(digest)
        return node.entries[group] if node is not None else None

    def has_entry(self, group: int, block: int) -> bool:
        """Whether the content of a block is known, and so must not be written over."""
        return block in self._entry_of[group]

    def note_hit(self, group: int, block: int) -> None:
        """A sequence has resumed from a cached block."""
        self._entry_of[group][block].num_hits += 1

    def note_held(self, group: int, block: int) -> None:
        """A cached block got its first reference: its entry cannot be evicted."""
        entry = self._entry_of[group][block]
        if entry.num_held == 0:
            del self._evictable[entry]
            self._order.note_kept(entry)
        entry.num_held += 1

    def note_released(self, group: int, block: int) -> bool:
        """A block lost its last reference; return whether its content stays (it has an entry)."""
        entry = self._entry_of[group].get(block)
        if entry is None:
            return False
        entry.num_held -= 1
        if entry.num_held == 0:
            self._evictable[entry] = None
            self._note_spare(entry)
            self._order.note_evictable(entry)
        return True

    def note_join(self, group: int, blocks: Sequence[int]) -> None:
        """One of some blocks that lie together is held now, where none was."""
        for entry in self.entries_among(group, blocks):
            self._note_spare(entry)

    def touch(self, digest: bytes) -> list[PrefixEntry]:
        """Count a use of a grain by someone who holds other blocks of the same content.

        Returns:
            What there is of it that can be evicted.
        """
        node = self._nodes.get(digest)
        entries = node.entries if node is not None else ()
        touched = [entry for entry in entries if entry is not None and entry.num_held == 0]
        for entry in touched:
            self._evictable.move_to_end(entry)
        return touched

    def entries_among(self, group: int, blocks: Sequence[int]) -> list[PrefixEntry]:
        """Return the entries that have one of a group's blocks, once each."""
        entry_of = self._entry_of[group]
        if len(blocks) == 1:
            entry = entry_of.get(blocks[0])
            return [] if entry is None else [entry]
        return list(dict.fromkeys(entry_of[block] for block in blocks if block in entry_of))

    def beside(self, group: int) -> Collection[PrefixEntry]:
        """Return, in order, the entries of a group that may lie beside held blocks.

        None is missing that does, can be evicted and has nothing behind it. With one group there is
        no difference between its blocks, and there are none.
        """
        return self._beside[group].keys()

    def note_not_beside(self, entries: Sequence[PrefixEntry]) -> None:
        """These are no such entries; `beside` has them again when they may have become some."""
        for entry in entries:
            del self._beside[entry.group][entry]

    def parent_of(self, entry: PrefixEntry) -> PrefixEntry | None:
        """Return what the entry's group has of the grain before."""
        return self.entry_at(entry.node.parent, entry.group)

    def children_of(self, entry: PrefixEntry) -> Iterator[PrefixEntry]:
        """Yield the entries that are of no use without an entry: those of the grains behind it."""
        if not self._managers[entry.group].needs_whole_prefix:
            return
        for node in self._children.get(entry.node.digest, ()):
            child = node.entries[entry.group]
            if child is not None:
                yield child

    def victims(self, protected: Container[PrefixEntry]) -> Iterator[PrefixEntry]:
        """Yield evictable entries, the least recently used first, except `protected` ones."""
        for entry in self._evictable:
            if entry not in protected:
                yield entry

    @property
    def first_victims(self) -> Collection[PrefixEntry]:
        """Evictable entries that should go before all others, in their order."""
        return self._order.first

    @property
    def useless(self) -> Collection[PrefixEntry]:
        """Evictable entries that nothing can resume from."""
        return self._order.useless

    def evict(self, entry: PrefixEntry) -> None:
        """Forget an evictable entry; the caller frees its blocks."""
        del self._evictable[entry]
        self._forget(entry)

    def clear(self) -> list[PrefixEntry]:
        """Forget and return everything; the caller frees blocks that nobody holds."""
        entries = [e for node in self._nodes.values() for e in node.entries if e is not None]
        self._evictable.clear()
        self._order.clear()
        self._nodes.clear()
        self._children.clear()
        for entry_of in self._entry_of:
            entry_of.clear()
        for beside in self._beside:
            beside.clear()
        return entries

    def _forget(self, entry: PrefixEntry) -> None:
        entry_of = self._entry_of[entry.group]
        for block in entry.block_ids:
            del entry_of[block]
        node = entry.node
        node.entries[entry.group] = None
        self._beside[entry.group].pop(entry, None)
        self._note_spare(self.parent_of(entry))
        self._order.note_kept(entry)
        if any(node.entries):
            self._order.note_change(node)
            return
        del self._nodes[node.digest]
        siblings = self._children[node.parent]
        del siblings[node]
        if not siblings:
            del self._children[node.parent]
        self._order.note_change(self._nodes.get(node.parent))

    def _note_spare(self, entry: PrefixEntry | None) -> None:
        """An entry may have become one of those that `beside` returns."""
        if len(self._managers) > 1 and entry is not None and entry.num_held == 0:
            self._beside[entry.group][entry] = None

    def _root(self, salt: str) -> bytes:
        root = self._roots.get(salt)
        if root is None:
            root = hashlib.sha256(self._geometry + b"\0" + salt.encode()).digest()
            if len(self._roots) < 1024:
                self._roots[salt] = root
        return root
