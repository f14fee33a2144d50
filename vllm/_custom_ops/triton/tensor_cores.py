"""Products without Hopper's warp-group instructions, for kernels that Triton miscompiles to them.

Used by the chunked kernels of layers with a state. In bfloat16 with tiles of 64 tokens, Triton 3.6
compiles several of their products to `wgmma` so that results are wrong or memory outside is read
(seen on an H200; the interpreter and the older `mma` agree with the naive twins).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH = "DISABLE_MMA_V3"
"""Triton's compiler reads it when it compiles a kernel; its cache keeps both kinds apart."""


@contextmanager
def plain_products() -> Iterator[None]:
    """Compile what is first launched inside to `mma` instructions, as on an A100."""
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before
