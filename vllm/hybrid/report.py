"""What hybrid mode says about itself: log lines of the start, trace of allocations, statistics.

Called by engine/core.py and engine/text_side.py. Plain data in; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllm.cache_spec import KVCacheGroup, State
from vllm.config.hybrid import HybridSettings
from vllm.hybrid.layer_kinds import kind_name
from vllm.logger import init_logger
from vllm.step import StepPlan

logger = init_logger(__name__)

_MAX_IDS = 64


def log_start(
    settings: HybridSettings, groups: Sequence[KVCacheGroup], default_block_tokens: int
) -> None:
    """Say which mode runs, and what each group keeps; nothing in vanilla mode."""
    if settings.policies is None:
        return
    sizes = settings.block_size_map(default_block_tokens)
    logger.info("Using hybrid attention mode with block_size_map=%s", sizes)
    for group in groups:
        is_state = isinstance(group.lifetime, State)
        unit = "one sequence" if is_state else f"{group.block_tokens} tokens"
        logger.info(
            "KV cache group %r: layers %s, %s, a block of %d bytes holds %s",
            group.name,
            list(group.layers),
            kind_name(group.lifetime),
            group.block_bytes,
            unit,
        )


def describe_settings(settings: HybridSettings) -> dict[str, Any]:
    """Return the part of the statistics that does not change.

    `mode` is "hybrid", "vanilla" (asked for) or "uniform" (the model has nothing to gain);
    `layer_types` says of each type which layers it has, what they keep, and whether that is less
    than the checkpoint was trained with.
    """
    if settings.policies is None:
        mode = "vanilla" if settings.is_vanilla else "uniform"
        return {"mode": mode, "layer_types": {}, "reduced_layers": []}
    types: dict[str, dict[str, Any]] = {}
    for policy in settings.policies:
        entry = types.setdefault(policy.kind, {"layers": [], "keeps": {}, "is_reduced": False})
        entry["layers"].append(policy.layer)
        entry["keeps"].setdefault(kind_name(policy.lifetime), []).append(policy.layer)
        entry["is_reduced"] |= policy.is_reduced
    for entry in types.values():
        if len(entry["keeps"]) == 1:
            entry["keeps"] = next(iter(entry["keeps"]))
    reduced = [policy.layer for policy in settings.policies if policy.is_reduced]
    return {"mode": "hybrid", "layer_types": types, "reduced_layers": reduced}


class AllocationTrace:
    """The log of what each step allocates; silent unless `--trace-level` asks for it.

    Args:
        level: "off", "info" (a line for each step that allocates) or "debug" (a line for each
            allocation: group, count, ids).
    """

    def __init__(self, level: str, groups: Sequence[KVCacheGroup]) -> None:
        self._level = level
        self._names = [group.name for group in groups]
        self._block_tokens = [
            None if isinstance(group.lifetime, State) else group.block_tokens for group in groups
        ]

    def log(self, plan: StepPlan) -> None:
        """Write what a plan allocates."""
        if self._level == "off":
            return
        counts = dict.fromkeys(self._names, 0)
        for seq_id, group, ids in self._list_allocations(plan):
            counts[group] += len(ids)
            if self._level == "debug":
                logger.info(
                    "step %d: sequence %s allocates group=%s count=%d ids=%s",
                    plan.step,
                    seq_id,
                    group,
                    len(ids),
                    _format_ids(ids),
                )
        if any(counts.values()):
            listed = ", ".join(f"{name}={count}" for name, count in counts.items())
            logger.info(
                "step %d: %d tokens of %d sequences, blocks allocated: %s",
                plan.step,
                plan.num_tokens,
                len(plan.rows),
                listed,
            )

    def _list_allocations(self, plan: StepPlan) -> Iterator[tuple[str, str, list[int]]]:
        """Yield (sequence, group, block ids) of every allocation, prefix hits left out."""
        for new in plan.new_rows:
            for name, tokens, ids in zip(
                self._names, self._block_tokens, new.block_ids, strict=True
            ):
                num_hit = 0 if tokens is None else -(-new.num_computed_tokens // tokens)
                fresh = [block for block in ids[num_hit:] if block >= 0]
                if fresh:
                    yield str(new.seq_id), name, fresh
        for row in plan.rows:
            for name, ids in zip(self._names, row.new_block_ids, strict=False):
                fresh = [block for block in ids if block >= 0]
                if fresh:
                    yield str(row.seq_id), name, fresh
        for copy in plan.copies:
            yield f"(copy of block {copy.source})", self._names[copy.group], [copy.target]


def _format_ids(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:_MAX_IDS]))
    more = len(ids) - _MAX_IDS
    return f"[{shown}{f', … {more} more' if more > 0 else ''}]"
