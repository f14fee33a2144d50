"""Fixtures of the op tests: every instruction set, the thread count kept, writes watched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests._custom_ops.write_watch import WriteWatch
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


@pytest.fixture(autouse=True)
def watch_writes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a test of this folder fail whose ops write where their schemas do not say so."""
    if request.path.parent != Path(__file__).parent:  # below it are those of GPUs
        yield
        return
    with WriteWatch("_C", "_C_cache_ops"):
        yield
