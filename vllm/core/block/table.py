"""Which block manager serves which lifetime: one row for each.

A lifetime without a row cannot be served by this build; `make_block_managers` says so by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.cache_spec import Chunk, Full, KVCacheGroup, State, Window
from vllm.core.block.abstract import BlockManager
from vllm.core.block.chunked import ChunkBlockManager
from vllm.core.block.paged import PagedBlockManager
from vllm.core.block.state import StateBlockManager
from vllm.core.block.window import WindowBlockManager
from vllm.errors import ConfigError

BLOCK_MANAGERS: dict[type, type[BlockManager]] = {
    Full: PagedBlockManager,
    Window: WindowBlockManager,
    Chunk: ChunkBlockManager,
    State: StateBlockManager,
}


def make_block_managers(groups: Sequence[KVCacheGroup]) -> tuple[BlockManager, ...]:
    """Return the block manager of each group.

    Raises:
        ConfigError: a lifetime has no row.
    """
    managers = []
    for group in groups:
        manager_class = BLOCK_MANAGERS.get(type(group.lifetime))
        if manager_class is None:
            known = ", ".join(lifetime.__name__ for lifetime in BLOCK_MANAGERS)
            raise ConfigError(
                f"cache group '{group.name}' (layers {list(group.layers)}) has lifetime "
                f"{type(group.lifetime).__name__}, which this build cannot serve; it serves {known}"
            )
        managers.append(manager_class(group))
    return tuple(managers)
