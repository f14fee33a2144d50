"""Fast launches take the kernel that Triton would take, and hand it the same arguments.

Nothing is compiled or run: stand-ins for Triton's compiler and driver write down what a launcher is
given.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from tests._custom_ops.triton.stand_in import Launcher, compile_nothing, install  # noqa: E402
from vllm._custom_ops.triton.launch import FastKernel, fast_launch  # noqa: E402


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Triton see an sm_90."""
    install(monkeypatch)
    monkeypatch.setattr("triton.compiler.compile", compile_nothing)
    Launcher.launches.clear()
    yield


def copy_and_add(out, x, bias, scale, num_rows, width, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < num_rows * width, other=0.0) * scale
    if HAS_BIAS:
        value += tl.load(bias + place % width).to(value.dtype)
    tl.store(out + place, value, mask=place < num_rows * width)


@pytest.fixture
def kernel() -> FastKernel:
    """A kernel as on a GPU, also where others are interpreted."""
    return fast_launch(JITFunction(copy_and_add, do_not_specialize=["num_rows"]))


def draw_arguments(rng: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of all kinds that Triton tells apart, and some that it does not."""
    dtypes = (torch.float32, torch.bfloat16)
    out = torch.zeros(64, dtype=rng.choice(dtypes))
    x = torch.zeros(64, dtype=rng.choice(dtypes))[rng.choice((0, 0, 8, 1)) :]
    bias = rng.choice((None, torch.zeros(8), torch.nn.Parameter(torch.zeros(8))))
    num_rows = rng.choice((1, 2, 3, 16, 17, 1 << 31))
    width = rng.choice((1, 8, 16, 32))
    scale = rng.choice((0.0, 1.0, 2.5))
    constants = {"BLOCK": rng.choice((16, 32)), "HAS_BIAS": bias is not None}
    if rng.random() < 0.3:
        constants |= {"num_warps": rng.choice((1, 2))}
    return (out, x, bias, scale, num_rows, width), constants


def test_the_same_kernel_with_the_same_arguments(kernel: FastKernel) -> None:
    rng = random.Random(0)
    for _ in range(250):
        args, constants = draw_arguments(rng)
        grid = rng.choice(((3,), (4, 2), (1, 2, 5)))
        kernel[grid](*args, **constants)
        kernel.jit[grid](*args, **constants)
        ours, theirs = Launcher.launches[-2:]
        assert ours == theirs


def test_most_launches_do_not_ask_triton(
    kernel: FastKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(64)
    kernel[(1,)](x, x, None, 1.0, 4, 16, BLOCK=16, HAS_BIAS=False)
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: pytest.fail("asked"))
    for num_rows in (1, 5, 16):
        kernel[(num_rows,)](x, x[4:], None, 2.0, num_rows, 16, BLOCK=16, HAS_BIAS=False)
    assert len(Launcher.launches) == 4


def test_memory_is_bounded(kernel: FastKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm._custom_ops.triton.launch._MAX_READY", 4)
    x = torch.zeros(64)
    for width in range(2, 12):
        kernel[(1,)](x, x, None, 1.0, 1, width, BLOCK=16, HAS_BIAS=False)
    assert len(kernel._ready) <= 4
    assert len(Launcher.launches) == 10


def test_interpreted_kernels_stay_as_they_are() -> None:
    assert fast_launch(copy_and_add) is copy_and_add
