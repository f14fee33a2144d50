"""What the prefix index knows of one grain of one token history.

Made by `core/prefix_index.py`; eviction reads it.
"""

from __future__ import annotations

from vllm.sequence import NO_BLOCK


class PrefixNode:
    """One grain of one history.

    Attributes:
        digest: key of the history up to the end of the grain.
        parent: key of the history before the grain.
        tokens: the grain's tokens as bytes, compared on every hit.
        entries: for each group, its blocks of the grain, or None.
    """

    __slots__ = ("digest", "entries", "parent", "tokens")

    def __init__(self, digest: bytes, parent: bytes, tokens: bytes, num_groups: int) -> None:
        self.digest = digest
        self.parent = parent
        self.tokens = tokens
        self.entries: list[PrefixEntry | None] = [None] * num_groups


class PrefixEntry:
    """What one group has stored of one grain.

    Attributes:
        table: block ids by position inside the grain; NO_BLOCK where nothing is stored.
        block_ids: those that are stored.
        num_held: how many of its blocks some sequence holds; 0 makes the entry evictable.
        num_hits: sequences that have resumed from it.
    """

    __slots__ = ("block_ids", "group", "node", "num_held", "num_hits", "table")

    def __init__(self, node: PrefixNode, group: int, table: tuple[int, ...]) -> None:
        self.node = node
        self.group = group
        self.table = table
        self.block_ids = (
            tuple(block for block in table if block != NO_BLOCK) if NO_BLOCK in table else table
        )
        self.num_held = len(self.block_ids)
        self.num_hits = 0

    @property
    def num_leading(self) -> int:
        """Entries stored from the beginning of the grain on."""
        return self.table.index(NO_BLOCK) if NO_BLOCK in self.table else len(self.table)

    @property
    def num_trailing(self) -> int:
        """Entries stored up to the end of the grain."""
        return self.table[::-1].index(NO_BLOCK) if NO_BLOCK in self.table else len(self.table)
