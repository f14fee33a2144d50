"""Lifetime Chunk: only the tokens of the current chunk of c positions are kept.

Served through `core/block/table.py`. Position p sees p//c*c … p, so at a multiple of c nothing at
all is visible and every block dies.
"""

from __future__ import annotations

from vllm.cache_spec import Chunk, KVCacheGroup
from vllm.core.block.window import RecentBlockManager


class ChunkBlockManager(RecentBlockManager):
    """Blocks of the chunk that the next token belongs to."""

    def __init__(self, group: KVCacheGroup) -> None:
        lifetime = group.lifetime
        assert isinstance(lifetime, Chunk), "the table pairs managers with lifetimes"
        self.chunk = max(1, lifetime.tokens)
        super().__init__(group, span=self.chunk - 1)

    def first_visible(self, position: int) -> int:
        """Position p sees p//c*c … p."""
        return position // self.chunk * self.chunk

    def next_death(self, first_dead: int) -> int:
        """The first chunk that begins behind the entry."""
        return -(-(first_dead + 1) * self.block_tokens // self.chunk) * self.chunk
