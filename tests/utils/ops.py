"""What tests of compiled ops share: odd inputs, poisoned outputs, tolerances, and the bit rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: (2e-6, 2e-6), torch.bfloat16: (8e-3, 1e-3)}
"""rtol and atol against a twin that rounds in the same places; a bfloat16 step is 2**-7."""


def random_rows(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    """Return normal numbers from their own generator."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def poisoned(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor that an op must overwrite in every element."""
    return torch.full(shape, float("nan"), dtype=dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Compare within the tolerance of the dtype; NaN equals NaN."""
    rtol, atol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


def assert_rows_stand_alone(run: Callable[[list[int]], Tensor], num_rows: int) -> None:
    """Check the bit rule: a row's result is the same alone, in any batch, and on any threads.

    Args:
        run: computes the given rows of one fixed input, in that order.
        num_rows: rows of that input.
    """
    torch.set_num_threads(1)
    whole = run(list(range(num_rows)))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(run(list(range(num_rows))), whole)
        backwards = run(list(range(num_rows))[::-1])
        assert torch.equal(backwards.flip(0), whole)
        for row in range(0, num_rows, max(1, num_rows // 5)):
            assert torch.equal(run([row])[0], whole[row])
