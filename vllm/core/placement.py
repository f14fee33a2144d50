"""Room for a sequence that enters: found on a shadow of the arena, carried out elsewhere.

Called by `core/cache_manager.py`. Nothing here changes anything, so a refused plan leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.core.block.abstract import BlockManager
from vllm.core.block.arena import ArenaShadow, SuperblockArena
from vllm.core.checkpoint import Wish
from vllm.core.eviction import choose_victims
from vllm.core.need import count_fresh, peak_blocks
from vllm.core.prefix_entry import PrefixEntry
from vllm.core.prefix_index import PrefixHit, PrefixIndex, resumed_tables
from vllm.sequence import NO_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionDemand:
    """What a sequence asks for when it enters.

    Attributes:
        hit: the cached prefix it resumes from.
        num_new: tokens of its first step.
        goal_tokens: length up to which it must find room, now or by evicting.
        max_chunk: most tokens of it in one step.
        reserve: for each group, blocks that must stay obtainable beside it for others.
        wish: blocks beyond its need for which it does not wait.
    """

    hit: PrefixHit
    num_new: int
    goal_tokens: int
    max_chunk: int
    reserve: Sequence[int]
    wish: Wish | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Room found for a new or resumed sequence.

    Attributes:
        num_computed: tokens of its prefix hit.
        num_new: tokens of its first step.
        tables: block tables of the hit.
        shared: (group, block) pairs in them.
        victims: cached entries to be evicted.
        wish: that of the demand, if there is room for it as well.
    """

    num_computed: int
    num_new: int
    tables: list[list[int]]
    shared: list[tuple[int, int]]
    victims: list[PrefixEntry]
    wish: Wish | None = None


def plan_admission(
    managers: Sequence[BlockManager],
    arena: SuperblockArena,
    index: PrefixIndex | None,
    demand: AdmissionDemand,
) -> Admission | None:
    """Return how a demand can be met, valid until arena or index change; None if it cannot."""
    hit = demand.hit
    grain = index.grain_tokens if index is not None else 1
    tables, shared = resumed_tables(managers, hit, grain)
    goals = peak_blocks(managers, demand.goal_tokens, demand.max_chunk)
    wanted = [
        max(0, goal - sum(block != NO_BLOCK for block in table)) + extra
        for goal, table, extra in zip(goals, tables, demand.reserve, strict=True)
    ]
    shadow = _hold_shared(arena, shared)
    if not shadow.fits_after_eviction(wanted):
        return None
    table_lens = [len(table) for table in tables]
    needs = count_fresh(managers, table_lens, hit.num_tokens, demand.num_new)
    protected = {entry for node in hit.nodes if node for entry in node.entries if entry}
    wish = demand.wish
    if wish is not None:
        optional = _hold_shared(arena, shared)
        victims = choose_victims(index, optional, wish.add_to(needs), protected)
        wish = None if victims is None else wish
    if wish is None:
        victims = choose_victims(index, shadow, needs, protected)
    if victims is None:
        return None
    return Admission(
        num_computed=hit.num_tokens,
        num_new=demand.num_new,
        tables=tables,
        shared=shared,
        victims=victims,
        wish=wish,
    )


def _hold_shared(arena: SuperblockArena, shared: Sequence[tuple[int, int]]) -> ArenaShadow:
    """Return a shadow in which the blocks of a hit are held."""
    shadow = ArenaShadow(arena)
    for group, block in shared:
        if arena.ref_count(group, block) == 0:
            shadow.hold(group, block)
    return shadow
