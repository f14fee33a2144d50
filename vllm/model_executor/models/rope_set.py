"""The rotary tables of one model, shared by its layers: made by `causal_lm.py`, asked by blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope


class RopeSet:
    """The rotary tables of one model; layers with the same settings share one."""

    def __init__(self, *, max_positions: int, max_model_len: int) -> None:
        self._max_positions = max_positions
        self._max_model_len = max_model_len
        self._made: dict[tuple[int, str, bool], RotaryEmbedding] = {}

    def get(
        self, head_size: int, settings: Mapping[str, Any], *, is_neox: bool = True
    ) -> RotaryEmbedding:
        """Return the table for a head size and rope settings.

        Args:
            head_size: elements of a head.
            settings: rope settings of the config.
            is_neox: whether element i turns with i + half, or even ones with their neighbours.
        """
        key = (head_size, json.dumps(dict(settings), sort_keys=True), is_neox)
        if key not in self._made:
            self._made[key] = get_rope(
                head_size,
                settings,
                max_positions=self._max_positions,
                max_model_len=self._max_model_len,
                is_neox=is_neox,
            )
        return self._made[key]

    def reserve(self, num_positions: int) -> None:
        """Make every table at least `num_positions` rows long."""
        for rope in self._made.values():
            rope.reserve(num_positions)
