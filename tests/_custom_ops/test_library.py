"""Loading of the compiled ops: the CUDA library is wanted exactly where torch finds a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.utils.op_schemas import Op, list_ops
from vllm._custom_ops import library
from vllm.errors import KernelError


@pytest.fixture(autouse=True)
def forget_loading() -> Iterator[None]:
    library.load_extension.cache_clear()
    yield
    library.load_extension.cache_clear()


@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_broken_cuda_library_is_said_where_there_is_a_device(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "_C_cuda.abi3.so"
    if how == "truncated":
        path.write_bytes(b"\x7fELF")
    monkeypatch.setattr(library, "_CUDA_LIBRARY", path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    expected = "are missing" if how == "missing" else "cannot be loaded: it is no shared library"
    with pytest.raises(KernelError, match=f"{path.name} {expected}") as raised:
        library.load_extension()
    assert "VLLM_TARGET_DEVICE=cuda pip install" in str(raised.value)
    assert "CUDA_VISIBLE_DEVICES=" in str(raised.value)


def test_cuda_library_is_not_wanted_without_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_CUDA_LIBRARY", tmp_path / "_C_cuda.abi3.so")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    library.load_extension()


@pytest.mark.parametrize(
    "op", [op for op in list_ops() if "/cpu/" in op.place], ids=lambda op: op.schema.name
)
def test_the_built_library_has_the_ops_of_the_sources(op: Op) -> None:
    library.load_extension()
    built = getattr(getattr(torch.ops, op.namespace), op.schema.name).default._schema
    assert str(built) == f"{op.namespace}::{op.schema}", "the library was built from other sources"
