"""Made-up weights, for running a model's shape without its files.

Called by `loader.py` for load_format "dummy". Values depend on a tensor's whole shape alone, and on
its name if asked: every split over ranks, every run and every machine serves the same model.
Cutting them out of one block of random numbers keeps a 7B model a matter of seconds. Reads no
files.
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
        config: their range, what norms are, and whether tensors begin alike.
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
            start = 0 if config.has_one_seed else find_start(name, block.numel())
            yield name, make_values(place.shape, block, start)


def find_start(name: str, num_values: int) -> int:
    """Return where in a block the numbers of a tensor begin that has its own."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % num_values


def make_values(shape: tuple[int, ...], block: Tensor, start: int) -> Tensor:
    """Fill a tensor from `block`, going round from `start` on."""
    values = torch.empty(shape, dtype=block.dtype, device=block.device)
    flat = values.view(-1)
    done = 0
    while done < flat.numel():
        size = min(block.numel() - start, flat.numel() - done)
        flat[done : done + size] = block[start : start + size]
        done, start = done + size, 0
    return values
