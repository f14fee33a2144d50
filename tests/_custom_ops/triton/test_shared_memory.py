"""Kernels take less shared memory on GPUs that have less, and what they took on others.

The GPUs are not there: torch is told what it would say of them. `test_compile.py` holds what is
counted here against what the compiler takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch

from vllm._custom_ops.triton.attention_shape import (
    Tile,
    count_shared_bytes,
    cut_tile,
    fit_chunk_tile,
    fit_decode_tile,
    fit_prefill_tile,
    split_head,
)
from vllm._custom_ops.triton.device import find_shared_bytes, fit_stages, holds_hopper_tiles

A100, H200, A10, RTX = (torch.device("cuda", index) for index in (100, 101, 102, 103))
"""Indices that no GPU has: what is remembered of them touches no other test."""

HEAD_SIZES = range(8, 648, 8)
"""What the backend `triton` serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """Of torch's, what is asked for."""

    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int


PROPERTIES = {
    A100: Properties(
        major=8, minor=0, multi_processor_count=108, shared_memory_per_block_optin=163 << 10
    ),
    H200: Properties(
        major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 << 10
    ),
    A10: Properties(
        major=8, minor=6, multi_processor_count=72, shared_memory_per_block_optin=99 << 10
    ),
    RTX: Properties(
        major=12, minor=0, multi_processor_count=170, shared_memory_per_block_optin=99 << 10
    ),
}


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch know these GPUs."""

    def find_capability(device: torch.device) -> tuple[int, int]:
        return PROPERTIES[device].major, PROPERTIES[device].minor

    monkeypatch.setattr(torch.cuda, "get_device_properties", PROPERTIES.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", find_capability)


def list_tiles(
    head_size: int, itemsize: int, has_one_field: bool, device: torch.device
) -> list[Tile]:
    """Return all tiles that attention may take for heads of a size."""
    return [
        fit_prefill_tile(head_size, itemsize, has_one_field, device),
        fit_chunk_tile(head_size, itemsize),
        *(
            fit_decode_tile(group, head_size, itemsize, has_one_field, num_groups, device)
            for group, num_groups in product((1, 8, 32, 128), (1, 2, 100, 1000))
        ),
    ]


@pytest.mark.parametrize("device", [A100, H200, torch.device("cpu")])
def test_no_tile_is_cut_where_there_is_room(device: torch.device) -> None:
    for sizes in product(HEAD_SIZES, (2, 4), (False, True)):
        for tile in list_tiles(*sizes, device):
            assert cut_tile(tile, *sizes, device) == tile


@pytest.mark.parametrize("device", [A10, RTX])
def test_every_tile_fits_where_there_is_less(device: torch.device) -> None:
    num_cut = 0
    for head_size, itemsize, has_one_field in product(HEAD_SIZES, (2, 4), (False, True)):
        row_bytes = sum(split_head(head_size)) * itemsize
        for tile in list_tiles(head_size, itemsize, has_one_field, device):
            cut = cut_tile(tile, head_size, itemsize, has_one_field, device)
            assert count_shared_bytes(cut, row_bytes, itemsize, has_one_field) <= 99 << 10
            assert min(cut.block_m, cut.block_n) >= 16
            num_cut += cut != tile
    assert num_cut > 0


def test_stages_go_before_keys() -> None:
    decode = Tile(block_m=16, block_n=64, num_warps=8, num_stages=3)
    assert cut_tile(decode, 256, 2, False, A10).num_stages == 2
    assert cut_tile(decode, 256, 2, False, A10).block_n == 64
    prefill = Tile(block_m=64, block_n=64, num_warps=8, num_stages=2)
    assert cut_tile(prefill, 256, 2, False, A10).num_stages == 2
    assert cut_tile(prefill, 256, 2, False, A10).block_n == 32


def test_stages_are_as_many_as_fit() -> None:
    assert [fit_stages(4, 48 << 10, 0, gpu) for gpu in (A100, H200, A10)] == [4, 4, 3]
    assert fit_stages(4, 33 << 10, 0, A10) == 4
    assert fit_stages(4, 33 << 10, 1, A10) == 3
    assert fit_stages(4, 1 << 20, 0, A10) == 1


def test_hopper_tiles_need_its_memory() -> None:
    found = [holds_hopper_tiles(gpu) for gpu in (A100, H200, A10, RTX, torch.device("cpu"))]
    assert found == [False, True, False, False, False]
    assert find_shared_bytes(torch.device("cpu")) == find_shared_bytes(A100)
