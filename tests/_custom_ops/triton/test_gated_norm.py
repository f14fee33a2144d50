"""The gated norm on a GPU, against its naive twin."""

from __future__ import annotations

import pytest
import torch

from tests.utils.ops import FLOAT_DTYPES, poisoned, random_rows
from tests.utils.states import assert_close
from vllm._custom_ops.naive import state_space as naive

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.4e-2}
"""Three steps of bfloat16: the interpreter truncates where a GPU rounds."""


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("shape", [(3, 2, 64), (1, 5, 19), (7, 1, 33), (2, 1, 1500), (0, 2, 8)])
def test_equals_the_twin(
    device: str, shape: tuple[int, int, int], gate_first: bool, dtype: torch.dtype
) -> None:
    from vllm._custom_ops.triton import gated_norm as ops

    tokens, groups, size = shape
    x, gate = (
        random_rows(tokens, groups * size + 3, dtype=dtype, seed=s).to(device) for s in (1, 2)
    )
    x, gate = x[:, 1:-2], gate[:, 3:]
    for num_weights in {size, groups * size}:
        weight = random_rows(num_weights, dtype=dtype, seed=3).to(device)
        actual, expected = (poisoned(x.shape, dtype).to(device) for _ in range(2))
        ops.gated_rms_norm(actual, x, gate, weight, 1e-6, size, gate_first)
        naive.gated_rms_norm(expected, x, gate, weight, 1e-6, size, gate_first)
        assert_close(actual, expected, TOLERANCE[dtype])
        in_place = x.contiguous()
        ops.gated_rms_norm(in_place, in_place, gate, weight, 1e-6, size, gate_first)
        assert torch.equal(in_place, actual)
