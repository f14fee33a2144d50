"""Triton kernels run on the GPU where there is one, else interpreted on the CPU.

The interpreter is chosen when a kernel is defined, so that the variable stands before Triton is
first imported; nothing else of the suite imports it on a machine without a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def mend_interpreter() -> None:
    """Mend three things of Triton 3.6's interpreter.

    It makes a number of a loop bound by int() of an array of one element, which NumPy refuses from
    2.4 on; it multiplies tiles of bfloat16 as the integers that it keeps them in; and it truncates
    float32 to bfloat16 where a GPU rounds.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    patch_tensor = interpreter._patch_lang_tensor
    create_dot = interpreter.InterpreterBuilder.create_dot
    convert = interpreter._convert_float

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widen(tile: Any) -> Any:
        if tile.dtype.scalar != language.bfloat16:
            return tile
        data = (tile.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, language.float32)

    def widen_and_create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widen(a), widen(b), *rest)

    def convert_and_round(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (language.float32, language.bfloat16):
            return convert(data, source, target, mode)
        rounded = torch.from_numpy(np.array(data).view(np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)

    interpreter._patch_lang_tensor = patch_and_mend
    interpreter._convert_float = convert_and_round
    interpreter.InterpreterBuilder.create_dot = widen_and_create_dot


def keep_language() -> dict[types.ModuleType, dict[str, Any]]:
    """Return what Triton's language consists of."""
    importlib.import_module("triton.language.extra.libdevice")
    named = [module for name, module in sys.modules.items() if name.startswith("triton.language")]
    return {module: dict(vars(module)) for module in named}


def put_language(kept: dict[types.ModuleType, dict[str, Any]]) -> None:
    """Let Triton's language consist of what was kept, and of nothing else."""
    for module, names in kept.items():
        for name in vars(module).keys() - names.keys():
            delattr(module, name)
        for name, value in names.items():
            setattr(module, name, value)


@contextmanager
def compiled_language() -> Iterator[None]:
    """Take out what the interpreter leaves in Triton's language, so that kernels compile inside.

    Afterwards it is there again: functions that were interpreted before need it.
    """
    interpreted = keep_language()
    put_language(LANGUAGE)
    try:
        yield
    finally:
        put_language(interpreted)


LANGUAGE: dict[types.ModuleType, dict[str, Any]] = {}
if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    mend_interpreter()
    LANGUAGE |= keep_language()


@pytest.fixture
def device() -> str:
    """Where the tensors of a kernel test lie."""
    return "cuda" if torch.cuda.is_available() else "cpu"
