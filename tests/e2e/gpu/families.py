"""One tiny checkpoint of every family, as directories that an engine loads."""

from __future__ import annotations

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
from tests.models.families import FAMILIES, make_reference

_MANY = {
    "bamba": test_bamba.ROWS,
    "granite_hybrid": test_granite_hybrid.ROWS,
    "lfm2": test_lfm2.ROWS,
    "nemotron_h": test_nemotron_h.ROWS,
    "qwen3_5": test_qwen3_5.ROWS,
    "qwen3_next": test_qwen3_next.ROWS,
}
HYBRID: dict[str, TinyRow] = {
    **{f"{family}_{name}": row for family, rows in _MANY.items() for name, row in rows.items()},
    "deepseek_v2": test_deepseek_v2.ROW,
    "gemma3n": test_gemma3n.ROW,
    "gpt_oss": test_gpt_oss.ROW,
    "llama4": test_llama4.ROW,
}
NAMES = (*FAMILIES, *HYBRID)


def write_checkpoint(name: str, root: Path) -> Path:
    """Write the checkpoint of a family and return its directory."""
    directory = root / name
    if not directory.exists():
        if name in FAMILIES:
            make_reference(name).save_pretrained(directory)
        else:
            make_checkpoint(HYBRID[name], directory)
    return directory
