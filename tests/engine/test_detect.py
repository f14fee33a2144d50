"""What the driver says of a GPU, asked without torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.platforms import detect


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Ask anew, and let nobody hear of it later."""
    detect.find_gpu_bytes.cache_clear()
    yield
    detect.find_gpu_bytes.cache_clear()


def make_driver(num_bytes: int, status: int) -> Any:
    def tell(target: Any, device: int) -> int:
        ctypes.cast(target, ctypes.POINTER(ctypes.c_size_t))[0] = num_bytes
        return status

    return SimpleNamespace(cuDeviceTotalMem_v2=tell)


@pytest.mark.parametrize(
    ("fault", "status", "expected"), [("", 0, 80 << 30), ("", 3, 0), ("no driver", 0, 0)]
)
def test_memory_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, fault: str, status: int, expected: int
) -> None:
    monkeypatch.setattr(detect, "find_cuda_fault", lambda: fault)
    monkeypatch.setattr(detect, "_load_driver", lambda: make_driver(80 << 30, status))
    assert detect.find_gpu_bytes() == expected
