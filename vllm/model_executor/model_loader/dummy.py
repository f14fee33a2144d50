"""Made-up weights, for running a model's shape without its files.

Called by `loader.py` for load_format "dummy". Values depend on a tensor's name and whole shape
alone, so every split over ranks, every run and every machine serves the same model. Cutting them
out of one block of random numbers keeps a 7B model a matter of seconds. Reads no files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from vllm.config import DummyConfig
from vllm.model_executor.layers.weight_place import WeightPlace

# A prime, so that the rows of a matrix do not repeat each other.
_BLOCK_ELEMENTS = 1_048_573
_SEED = 1234


def iterate_dummy(
    places: Mapping[str, WeightPlace],
    dtype: torch.dtype,
    device: torch.device,
    config: DummyConfig,
) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor for every name: matrices and biases at random, norms as `config` says.

    Args:
        places: where a model wants each tensor; the whole shape is taken from it.
        dtype: element type of the values.
        device: where the values are made; they are the same on every device.
        config: their range, and what norms are.
    """
    generator = torch.Generator().manual_seed(_SEED)
    block = torch.empty(_BLOCK_ELEMENTS)
    block.uniform_(-config.value_range, config.value_range, generator=generator)
    block = block.to(device, dtype)
    for name, place in places.items():
        is_norm = len(place.shape) == 1 and name.endswith(".weight")
        if is_norm and not config.has_random_norms:
            yield name, torch.full(place.shape, 1.0 - place.offset, dtype=dtype, device=device)
        else:
            yield name, make_values(name, place.shape, block)


def make_values(name: str, shape: tuple[int, ...], block: Tensor) -> Tensor:
    """Fill a tensor from `block`, going round, starting where the name says."""
    values = torch.empty(shape, dtype=block.dtype, device=block.device)
    flat = values.view(-1)
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "little") % block.numel()
    done = 0
    while done < flat.numel():
        size = min(block.numel() - start, flat.numel() - done)
        flat[done : done + size] = block[start : start + size]
        done, start = done + size, 0
    return values
