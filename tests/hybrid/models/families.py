"""One tiny checkpoint of every hybrid family, as directories that an engine loads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.hybrid.models import (
    test_bamba,
    test_deepseek_v2,
    test_gemma3n,
    test_gpt_oss,
    test_granite_hybrid,
    test_lfm2,
    test_llama4,
    test_nemotron_h,
    test_qwen3_5,
    test_qwen3_next,
)
from tests.hybrid.models.tiny import TinyRow, make_checkpoint

_MANY = {
    "bamba": test_bamba.ROWS,
    "granite_hybrid": test_granite_hybrid.ROWS,
    "lfm2": test_lfm2.ROWS,
    "nemotron_h": test_nemotron_h.ROWS,
    "qwen3_5": test_qwen3_5.ROWS,
    "qwen3_next": test_qwen3_next.ROWS,
}
_ROWS: dict[str, TinyRow] = {
    **{f"{family}_{name}": row for family, rows in _MANY.items() for name, row in rows.items()},
    "deepseek_v2": test_deepseek_v2.ROW,
    "gemma3n": test_gemma3n.ROW,
    "gpt_oss": test_gpt_oss.ROW,
    "llama4": test_llama4.ROW,
}
HYBRID_WRITERS: dict[str, Callable[[Path], object]] = {
    name: partial(make_checkpoint, row) for name, row in _ROWS.items()
}
