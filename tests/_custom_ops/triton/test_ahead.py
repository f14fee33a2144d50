"""What other processes compile ahead is what a launch finds in the cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
# Triton imports it late, when the fixture has said that nothing is interpreted: too late for it.
pytest.importorskip("triton.experimental.gluon")

from triton.runtime.driver import driver  # noqa: E402

from tests._custom_ops.triton import kernel_to_compile  # noqa: E402
from tests._custom_ops.triton.stand_in import Driver, Launcher  # noqa: E402
from vllm._custom_ops.triton.ahead import KernelNote, compile_kernels, note_kernels  # noqa: E402


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let Triton see an sm_90 and an empty cache, and kernels that are not interpreted."""
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    Launcher.launches.clear()
    yield


def launch(kernel: Any, num_rows: int, block: int) -> None:
    x = torch.zeros(64)
    kernel[(1,)](x, num_rows, BLOCK=block)


def note(kernel: Any) -> list[KernelNote]:
    with note_kernels() as notes:
        for num_rows in (1, 16, 32, 33):  # 1, multiples of 16, others
            launch(kernel, num_rows, 16)
        launch(kernel, 16, 32)
    return notes


def test_notes_launch_and_compile_nothing(tmp_path: Path) -> None:
    notes = note(kernel_to_compile.make())
    assert len(notes) == 4
    assert not Launcher.launches
    assert not list(tmp_path.rglob("*.cubin"))


def test_a_launch_finds_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    hits = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda cache_hit, **_: hits.append(cache_hit)
    )
    compile_kernels(note(kernel_to_compile.make()), max_processes=2)
    kernel = kernel_to_compile.make()
    assert not note(kernel), "all is on disk"
    launch(kernel, 16, 32)
    launch(kernel, 1, 16)
    assert hits == [True, True]
    assert len(Launcher.launches) == 2


def test_a_failure_is_said_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    broken = KernelNote(module="no.such", name="kernel", data="{}")
    with caplog.at_level("WARNING", "vllm"):
        logging.getLogger("vllm").addHandler(caplog.handler)
        compile_kernels([broken], max_processes=1)
    assert "No module named" in caplog.text
