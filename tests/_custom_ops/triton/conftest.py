"""Triton kernels run on the GPU where there is one, else interpreted on the CPU.

The interpreter is chosen when a kernel is defined, so that the variable stands before Triton is
first imported; nothing else of the suite imports it on a machine without a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> str:
    """Where the tensors of a kernel test lie."""
    return "cuda" if torch.cuda.is_available() else "cpu"
