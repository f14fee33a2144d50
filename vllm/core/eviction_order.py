"""Which cached blocks go before the least recently used ones, where a prefix needs a checkpoint.

Used by `core/prefix_index.py`. With states a prefix can be resumed at checkpoints only: rows behind
the last one of every history, and copies whose prefix is gone, are of no use and are not kept. When
room is needed, copies that nobody has resumed from go first, since a state is large and most
prompts never come back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

from vllm.core.block.abstract import BlockManager
from vllm.core.prefix_entry import PrefixEntry, PrefixNode


class EvictionOrder:
    """Classes of evictable entries; every event costs a look at one node or two."""

    def __init__(
        self,
        managers: Sequence[BlockManager],
        children: Mapping[bytes, Collection[PrefixNode]],
    ) -> None:
        self._states = tuple(g for g, m in enumerate(managers) if not m.is_positional)
        self._whole = tuple(g for g, m in enumerate(managers) if m.needs_whole_prefix)
        self._children = children
        self._orphans: OrderedDict[PrefixEntry, None] = OrderedDict()
        self._unproven: OrderedDict[PrefixEntry, None] = OrderedDict()

    @property
    def useless(self) -> Collection[PrefixEntry]:
        """Entries that nothing can resume from."""
        return self._orphans.keys()

    @property
    def first(self) -> Collection[PrefixEntry]:
        """Entries that go before all others, in their order."""
        return self._unproven.keys()

    def note_change(self, node: PrefixNode | None) -> None:
        """A grain has got or lost an entry, or a grain behind it; None where it is not known."""
        if self._states and node is not None:
            self._classify_node(node)

    def note_evictable(self, entry: PrefixEntry) -> None:
        """Nobody holds an entry any more."""
        if self._states:
            self._classify(entry)

    def note_kept(self, entry: PrefixEntry) -> None:
        """An entry is held again, or gone."""
        self._orphans.pop(entry, None)
        self._unproven.pop(entry, None)

    def clear(self) -> None:
        """Forget everything."""
        self._orphans.clear()
        self._unproven.clear()

    def _classify_node(self, node: PrefixNode) -> None:
        for entry in node.entries:
            if entry is not None and entry.num_held == 0:
                self._classify(entry)

    def _classify(self, entry: PrefixEntry) -> None:
        is_orphan = self._is_useless(entry)
        is_unproven = not is_orphan and entry.group in self._states and not entry.num_hits
        for members, belongs in ((self._orphans, is_orphan), (self._unproven, is_unproven)):
            if belongs:
                members.setdefault(entry)
            else:
                members.pop(entry, None)

    def _is_useless(self, entry: PrefixEntry) -> bool:
        entries = entry.node.entries
        if any(entries[group] is None for group in self._whole):
            return True
        has_checkpoint = all(entries[group] is not None for group in self._states)
        if entry.group in self._states:
            return not has_checkpoint
        return not has_checkpoint and entry.node.digest not in self._children
