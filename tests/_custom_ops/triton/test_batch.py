"""The ops that make a decode step's tensors on the device."""

from __future__ import annotations

import pytest
import torch

from vllm._custom_ops.naive import batch as naive

ROWS = [3, 0, -1, 6]
PAD = 999


@pytest.fixture
def columns(device: str) -> torch.Tensor:
    """Place, computed tokens and token of four rows: known, known on the device only, padding."""
    lens, tokens = [0, 17, -1, 40], [11, -1, -1, 5]
    return torch.tensor([ROWS, lens, tokens], device=device).T.contiguous()


@pytest.mark.parametrize("block_tokens", [8, 16])
def test_rows_of_a_decode_step(device: str, columns: torch.Tensor, block_tokens: int) -> None:
    from vllm._custom_ops.triton import batch as ops

    table = torch.arange(8 * 1300, dtype=torch.int32, device=device).view(8, 1300)
    table[6, 40 // block_tokens] = PAD  # this token is not stored
    last_tokens = torch.arange(100, 108, device=device)
    found = []
    for module in (ops, naive):
        ids, positions = (torch.full((4,), -7, device=device) for _ in range(2))
        lens = torch.full((4,), -7, dtype=torch.int32, device=device)
        offsets = torch.full((4, 1200), -7, dtype=torch.int32, device=device)
        slots = torch.full((4, 2), -7, dtype=torch.int32, device=device)
        module.prepare_decode_tokens(ids, positions, lens, *columns.unbind(1), last_tokens)
        module.prepare_decode_group(
            offsets, slots, columns[:, 0], positions, table, block_tokens, PAD
        )
        found.append((ids, positions, lens, offsets, slots))
    for ours, twin in zip(*found, strict=True):
        assert torch.equal(ours, twin)
    ids, _, lens, offsets, slots = found[0]
    assert ids.tolist() == [11, 100, 0, 5]
    assert lens.tolist() == [1, 18, 0, 41]
    assert slots[:, 0].tolist() == [table[3, 0].item(), table[0, 17 // block_tokens].item(), -1, -1]
    assert (offsets[2] == PAD).all()


def test_a_group_of_states_has_no_slots(device: str, columns: torch.Tensor) -> None:
    from vllm._custom_ops.triton import batch as ops

    table = torch.arange(8, dtype=torch.int32, device=device).view(8, 1)
    offsets = torch.empty(4, 1, dtype=torch.int32, device=device)
    slots = torch.empty(0, 2, dtype=torch.int32, device=device)
    positions = columns[:, 1].clamp(min=0)
    ops.prepare_decode_group(offsets, slots, columns[:, 0], positions, table, 1, PAD)
    assert offsets[:, 0].tolist() == [3, 0, PAD, 6]
