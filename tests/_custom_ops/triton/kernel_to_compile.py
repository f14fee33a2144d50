"""A kernel for `test_ahead.py`, in a module of its own that another process can import."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction

from vllm._custom_ops.triton.launch import fast_launch


def add_one(x, num_rows, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(x + place, tl.load(x + place) + num_rows)


_function = add_one


def make() -> Any:
    """Return the kernel with nothing compiled yet."""
    return fast_launch(JITFunction(_function))


add_one = make()
