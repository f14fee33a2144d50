"""Numbers that stand in C++ and in Python, since neither can read the other's, are the same.

Where they differ nothing fails, but a shape is served more slowly, or in other bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.utils.source_tree import ROOT
from vllm._custom_ops import linear
from vllm._custom_ops.naive import cache as naive_cache
from vllm._custom_ops.naive import linear as naive_linear
from vllm._custom_ops.triton import stream_table
from vllm.cache_spec import BLOCK_ALIGNMENT_BYTES
from vllm.model_executor.layers import layernorm
from vllm.model_executor.models import heads
from vllm.worker import input_batch

NUMBERS = {
    "kBlockCols": (linear.BLOCK_COLUMNS, naive_linear.BLOCK_COLUMNS),
    "kMaxFastParts": (stream_table.MAX_PARTS,),
    "kMaxPartsRow": (layernorm.PARTS_SIZES[-1],),
    "kPartKeys": (input_batch._KEY_PART,),
    "kPartsHeadSize": (heads.PARTS_HEAD_SIZE,),
    "kUnitBytes": (BLOCK_ALIGNMENT_BYTES, naive_cache.UNIT_BYTES),
}
"""By the name of all constants of C++ that have to be the same."""


def find_constants(name: str) -> Iterator[int]:
    """Yield what every constant of a name is set to in the sources."""
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            for value in re.findall(rf"\bconstexpr \w+ {name} = (\d+);", path.read_text()):
                yield int(value)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_the_same_in_cpp_and_python(name: str) -> None:
    found = set(find_constants(name))
    assert found == set(NUMBERS[name]), f"{name} is {found}, in Python {NUMBERS[name]}"
