"""Fixtures of the op tests: every instruction set of this machine, and the thread count kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vllm._custom_ops.library import CPU_ISAS, available_cpu_isas, cpu_isa, set_cpu_isa


@pytest.fixture(params=CPU_ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once with each instruction set that the processor has."""
    if request.param not in available_cpu_isas():
        pytest.skip(f"this processor has no {request.param}")
    before = cpu_isa()
    set_cpu_isa(request.param)
    yield request.param
    set_cpu_isa(before)


@pytest.fixture(autouse=True)
def keep_num_threads() -> Iterator[None]:
    """Give torch its number of threads back after a test that changed it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
