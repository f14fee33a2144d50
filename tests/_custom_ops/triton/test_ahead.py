"""What another process compiles ahead is what a launch finds in the cache, whatever befalls it."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
# Triton imports it late, when the fixture has said that nothing is interpreted: too late for it.
pytest.importorskip("triton.experimental.gluon")

from tests._custom_ops.triton import kernel_to_compile  # noqa: E402
from tests._custom_ops.triton.conftest import compiled_language  # noqa: E402
from tests._custom_ops.triton.stand_in import Launcher, install  # noqa: E402
from vllm._custom_ops.triton import cache_folder, compiler  # noqa: E402
from vllm._custom_ops.triton.ahead import KernelNote, note_kernels  # noqa: E402
from vllm._custom_ops.triton.compiler import KernelCompiler  # noqa: E402
from vllm.errors import KernelError  # noqa: E402
from vllm.worker import gpu_kernels  # noqa: E402


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let Triton see an sm_90 and an empty cache, and kernels that are not interpreted."""
    install(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    Launcher.launches.clear()
    with compiled_language():
        yield
    triton.knobs.cache.reset()  # a folder that was set would stand before the next test's own


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The project's log."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    with caplog.at_level("INFO", "vllm"):
        yield caplog
    logger.removeHandler(caplog.handler)


def launch(kernel: Any, num_rows: int, block: int) -> None:
    x = torch.zeros(64)
    kernel[(1,)](x, num_rows, BLOCK=block)


def note(kernel: Any) -> list[KernelNote]:
    with note_kernels() as notes:
        for num_rows in (1, 16, 32, 33):  # 1, multiples of 16, others
            launch(kernel, num_rows, 16)
        launch(kernel, 16, 32)
    return notes


def list_children(pid: int) -> set[int]:
    """Return the processes that a process has started."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for file in found for child in file.read_text().split()}


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
    before = list_children(os.getpid())
    with KernelCompiler() as made:
        made.compile(note(kernel_to_compile.make()))
    assert list_children(os.getpid()) == before
    kernel = kernel_to_compile.make()
    assert not note(kernel), "all is on disk"
    launch(kernel, 16, 32)
    launch(kernel, 1, 16)
    assert hits == [True, True]
    assert len(Launcher.launches) == 2


def test_its_process_starts_early_where_it_will_be_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = list_children(os.getpid())
    for num_processors, has_entries in ((2, False), (3, False), (3, True)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=num_processors: set(range(n)))
        if has_entries:
            (tmp_path / "entry").mkdir()
        with KernelCompiler() as made:
            started = list_children(os.getpid()) - before
            assert bool(started) == (num_processors > 2 and not has_entries)
            made.compile([])
        assert list_children(os.getpid()) == before, "also if it was not needed"


def test_its_process_does_not_start_early_for_kernels_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", None)
        with KernelCompiler(starts_early=False):
            pass
    before = list_children(os.getpid())
    with KernelCompiler(starts_early=False) as made:
        made.compile(note(kernel_to_compile.make()))
        assert list_children(os.getpid()) != before, "nobody else has served after all"


@pytest.mark.parametrize(
    ("named", "installed", "expected"),
    [
        ("", (), False),
        ("auto", ("xformers",), False),
        ("", ("flash_attn",), True),
        ("", ("flash_attn_interface", "xformers"), True),
        ("triton", ("flash_attn",), False),
        ("FLASH_ATTN", (), True),
        ("XFORMERS", (), True),
        ("TORCH_SDPA", (), True),
    ],
)
def test_kernels_of_others_are_expected(
    monkeypatch: pytest.MonkeyPatch, named: str, installed: tuple[str, ...], expected: bool
) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", named)
    specs = {name: ModuleSpec(name, None) for name in installed}
    monkeypatch.setattr(gpu_kernels, "find_spec", specs.get)
    assert gpu_kernels.expects_others() is expected


def test_few_kernels_do_not_start_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    before = list_children(os.getpid())
    with KernelCompiler() as made:
        made.compile(note(kernel_to_compile.make())[:2])
        assert list_children(os.getpid()) == before


def test_a_failure_is_said_and_others_go_on(log: pytest.LogCaptureFixture) -> None:
    broken = KernelNote(module="no.such", name="kernel", data="{}")
    notes = note(kernel_to_compile.make())
    with KernelCompiler() as made:
        made.compile([broken, *notes])
    assert "not compiled ahead: kernel: ModuleNotFoundError: No module" in log.text
    assert f"Compiled {len(notes)} kernels" in log.text
    assert not note(kernel_to_compile.make())


def test_a_fork_that_dies_takes_no_other_along(log: pytest.LogCaptureFixture) -> None:
    deadly = KernelNote(module="tests._custom_ops.triton.deadly_kernel", name="kernel", data="{}")
    with KernelCompiler() as made:
        made.compile([deadly, *note(kernel_to_compile.make())])
    assert "not compiled ahead: kernel: its process was killed by SIGSEGV" in log.text
    assert not note(kernel_to_compile.make())


@pytest.mark.parametrize("happens", ["dies", "hangs", "never starts"])
def test_what_is_not_done_is_left_to_launches(
    happens: str, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = {"dies": "exit(3)", "hangs": "import time; time.sleep(60)"}.get(happens, "")
    monkeypatch.setattr(compiler, "_PROGRAM", program)
    if happens == "never starts":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    notes = note(kernel_to_compile.make())
    started_s = time.monotonic()
    with KernelCompiler(max_s=0.5) as made:
        made.compile(notes)
    assert time.monotonic() - started_s < 20
    text = "when they are first launched" if happens == "never starts" else f"{len(notes)} kernels"
    assert text in log.text
    kernel = kernel_to_compile.make()
    launch(kernel, 16, 32)
    assert len(Launcher.launches) == 1


def test_an_interrupt_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_PROGRAM", "import time; time.sleep(60)")
    before = list_children(os.getpid())
    with pytest.raises(KeyboardInterrupt), KernelCompiler() as made:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        made.compile(note(kernel_to_compile.make()))
    assert list_children(os.getpid()) == before


def test_its_process_ends_with_whoever_asked(tmp_path: Path) -> None:
    """Killed, an engine can end nothing itself."""
    code = (
        "import sys, time\n"
        f"sys.path[:] = {sys.path!r}\n"
        "from vllm._custom_ops.triton.compiler import KernelCompiler\n"
        "made = KernelCompiler()\n"
        "made._start()\n"
        'made._process.stdin.write(b\'{"target": ["cuda", 90, 32], "max_processes": 2, \'\n'
        '    b\'"notes": [{"module": "tests._custom_ops.triton.deadly_kernel", \'\n'
        '    b\'"name": "endless", "data": ""}]}\\n\')\n'
        "made._process.stdin.flush()\n"
        "print(made._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    asker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert asker.stdout is not None
    pid = int(asker.stdout.readline())
    deadline_s = time.monotonic() + 60
    while not (forks := list_children(pid)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert forks, "a kernel is being compiled"
    for fork in forks:  # where memory runs out, it is they who go
        assert Path(f"/proc/{fork}/oom_score_adj").read_text().strip() == "1000"
    asker.kill()
    asker.wait()
    asker.stdout.close()
    while any(map(is_running, {pid, *forks})) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not any(map(is_running, {pid, *forks}))


def is_running(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def refuse_files(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let a folder be one that cannot be written."""
    make_file = cache_folder.tempfile.TemporaryFile

    def refuse(dir: Path) -> Any:
        if dir == folder:
            raise PermissionError(13, "Permission denied", str(dir))
        return make_file(dir=dir)

    monkeypatch.setattr(cache_folder.tempfile, "TemporaryFile", refuse)


def test_a_full_disk_is_a_cache_that_cannot_be_written(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It takes an empty file, and would end the engine at the first kernel that is missing."""

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    make_file = cache_folder.tempfile.TemporaryFile
    monkeypatch.setattr(
        cache_folder.tempfile,
        "TemporaryFile",
        lambda dir: Full() if dir == tmp_path else make_file(dir=dir),
    )
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.cache, "dir", str(tmp_path))
        cache_folder.provide_cache_folder()
        assert triton.knobs.cache.dir != str(tmp_path)
    assert "No space left on device" in log.text
    monkeypatch.setattr(cache_folder.tempfile, "TemporaryFile", lambda dir: Full())
    with pytest.raises(KernelError, match="TRITON_CACHE_DIR"):
        cache_folder.provide_cache_folder()


def test_a_cache_that_cannot_be_written_is_read(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with KernelCompiler() as made:
        made.compile(note(kernel_to_compile.make()))

    (tmp_path / "half a kernel").mkdir()
    (tmp_path / "no folder").touch()
    refuse_files(monkeypatch, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.cache, "dir", str(tmp_path))
        cache_folder.provide_cache_folder()
        assert triton.knobs.cache.dir != str(tmp_path)
        entries = list(Path(triton.knobs.cache.dir).iterdir())
        assert entries and not any(entry.is_symlink() for entry in entries), "files can be added"
        assert "Permission denied" in log.text
        assert not note(kernel_to_compile.make()), "all is found"
        with note_kernels() as others:
            launch(kernel_to_compile.make(), 16, 64)
        assert len(others) == 1
        launch(kernel_to_compile.make(), 16, 64)


def test_ranks_share_what_is_compiled_beside_such_a_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with KernelCompiler() as made:
        made.compile(note(kernel_to_compile.make()))
    shared = tmp_path.with_name("of an engine")

    refuse_files(monkeypatch, tmp_path)
    registered: list[object] = []
    monkeypatch.setattr(cache_folder.atexit, "register", lambda *args, **_: registered.append(args))
    for rank in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(triton.knobs.cache, "dir", str(tmp_path))
            cache_folder.provide_cache_folder(shared)
            cache_folder.provide_cache_folder()  # as its worker does, in whose place it stays
            assert triton.knobs.cache.dir == str(shared)
            assert not note(kernel_to_compile.make()), "all is found"
            with note_kernels() as others:
                launch(kernel_to_compile.make(), 16, 64)
            assert len(others) == (1 if rank == 0 else 0)
            launch(kernel_to_compile.make(), 16, 64)
    assert not registered, "whoever made the folder's place removes it"
