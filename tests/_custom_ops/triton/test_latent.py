"""The kernel of latent attention's rows against its naive twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.utils.ops import poisoned, random_rows
from tests.utils.paged import cumulative, make_paged_cache
from vllm._custom_ops.naive import latent as naive
from vllm._custom_ops.triton import latent as ops
from vllm.errors import ShapeError

LATENT, ROPE, HEADS, TOKENS = 48, 16, 3, 5


def make_arguments(dtype: torch.dtype, *, is_neox: bool) -> dict[str, Any]:
    """Return the op's arguments; queries are the ends of longer heads, one token has no slot."""
    cache = make_paged_cache([TOKENS], 1, LATENT + ROPE, 4, dtype)
    slots = cache.slots(0, 0, TOKENS).clone()
    slots[2, 0] = -1
    asked = random_rows(TOKENS, HEADS, 8 + ROPE, dtype=dtype, seed=1)
    angles = random_rows(9, ROPE // 2, dtype=torch.float32, seed=3)
    return {
        "row_TD": random_rows(TOKENS, LATENT + ROPE, dtype=dtype, seed=0),
        "query_THR": asked[:, :, 8:],
        "turned_THR": torch.zeros(TOKENS, HEADS, LATENT + ROPE, dtype=dtype)[:, :, LATENT:],
        "positions": torch.tensor([0, 8, 3, 3, 5]),
        "slots_T2": slots,
        "cache": cache.key,
        "weight": random_rows(LATENT, dtype=dtype, seed=2),
        "epsilon": 1e-6,
        "cos_sin": torch.cat((angles.cos(), angles.sin()), 1),
        "is_neox": is_neox,
    }


def to(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    """Bring tensors to a device, views with their strides."""

    def move(x: Tensor) -> Tensor:
        whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        return whole.clone().to(device).as_strided(x.shape, x.stride(), x.storage_offset())

    return {n: move(x) if isinstance(x, Tensor) else x for n, x in arguments.items()}


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_in_place", [False, True])
def test_equals_twin(device: str, dtype: torch.dtype, is_neox: bool, is_in_place: bool) -> None:
    expected = make_arguments(dtype, is_neox=is_neox)
    found = to(expected, device)
    if is_in_place:
        for arguments in (expected, found):
            arguments["turned_THR"] = arguments["query_THR"]
    naive.latent_norm_rope_cache(**expected)
    ops.latent_norm_rope_cache(**found)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for name in ("row_TD", "turned_THR", "cache"):
        torch.testing.assert_close(
            found[name].cpu(), expected[name], rtol=tolerance, atol=tolerance, equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_equal_twin(device: str, dtype: torch.dtype) -> None:
    made = random_rows(TOKENS, HEADS, 24 + 16, dtype=dtype, seed=0)
    row = random_rows(TOKENS, LATENT + ROPE, dtype=dtype, seed=1)
    expected = poisoned((TOKENS, HEADS, 24 + ROPE), dtype)
    found = expected.to(device, copy=True)
    naive.latent_keys(expected, made, row, ROPE)
    ops.latent_keys(found, made.to(device), row.to(device), ROPE)
    assert torch.equal(found.cpu(), expected)
    with pytest.raises(ShapeError, match="keys have shape"):
        ops.latent_keys(found, made[:3].to(device), row.to(device), ROPE)


def test_join_equals_twin(device: str) -> None:
    lens, new = [40, 9, 20], [8, 9, 3]
    cache = make_paged_cache(lens, 1, LATENT + ROPE, 4, torch.float32)
    for i, (length, count) in enumerate(zip(lens, new, strict=True)):
        rows = random_rows(length - count, 1, LATENT + ROPE, dtype=torch.float32, seed=i)
        cache.write(i, 0, rows, rows)
    arguments = {
        "joined_SD": poisoned((40 + 9 + 12, LATENT + ROPE), torch.float32),
        "row_TD": random_rows(20, LATENT + ROPE, dtype=torch.float32, seed=5),
        "cache": cache.key,
        "block_offsets_BN": cache.block_offsets,
        "cu_query_lens": cumulative(new),
        "seq_lens": torch.tensor(lens).int(),
        "cu_key_lens": cumulative([40, 9, 12]),
        "max_key_len": 40,
    }
    found = to(arguments, device)
    naive.join_latents(**arguments)
    ops.join_latents(**found)
    assert torch.equal(found["joined_SD"].cpu(), arguments["joined_SD"])


def test_bad_arguments_name_what_was_given() -> None:
    arguments = make_arguments(torch.float32, is_neox=True)
    with pytest.raises(ShapeError, match="dtypes"):
        ops.latent_norm_rope_cache(**(arguments | {"weight": arguments["weight"].double()}))
    with pytest.raises(ShapeError, match="R is 16"):
        ops.latent_norm_rope_cache(**(arguments | {"cos_sin": torch.zeros(9, 8)}))
    with pytest.raises(ShapeError, match="L is 48"):
        ops.latent_norm_rope_cache(**(arguments | {"row_TD": torch.zeros(TOKENS, 60)}))
