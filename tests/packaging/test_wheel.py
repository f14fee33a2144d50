"""What a wheel and an sdist hold: the package, the console scripts, no tests, no debris."""

from __future__ import annotations

import configparser
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.utils.source_tree import ROOT, copy_sources, run_build
from vllm.version import __version__


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with the debris of earlier work in it."""
    tree = tmp_path_factory.mktemp("sources") / "tree"
    copy_sources(tree)
    for debris in ("build/lib/vllm/old.py", "vllm/_C_cpu.abi3.so", "vllm/__pycache__/x.pyc"):
        (tree / debris).parent.mkdir(parents=True, exist_ok=True)
        (tree / debris).write_text("")
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    target = tmp_path_factory.mktemp("wheel")
    run_build(tree, f"build_wheel({str(target)!r})")
    with zipfile.ZipFile(next(target.glob("*.whl"))) as archive:
        yield archive


def test_wheel_is_tagged_for_every_python(wheel: zipfile.ZipFile) -> None:
    assert wheel.filename is not None
    assert Path(wheel.filename).name == f"vllm_hybrid-{__version__}-py3-none-any.whl"


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    info = f"vllm_hybrid-{__version__}.dist-info/"
    names = wheel.namelist()
    assert all(name.startswith(("vllm/", info)) for name in names)
    ends = {".py": 0, "py.typed": 0}
    for name in names:
        if name.startswith("vllm/"):
            assert name.endswith(tuple(ends)), f"{name} does not belong into a wheel"
            assert "__pycache__" not in name and "/old.py" not in name
    assert info + "licenses/LICENSE" in names
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "vllm").rglob("*.py")}
    assert modules == {name for name in names if name.startswith("vllm/") and name.endswith(".py")}


def test_wheel_has_the_console_scripts(wheel: zipfile.ZipFile) -> None:
    scripts = configparser.ConfigParser()
    scripts.read_string(
        wheel.read(f"vllm_hybrid-{__version__}.dist-info/entry_points.txt").decode()
    )
    assert dict(scripts["console_scripts"]) == {
        "vllm": "vllm.scripts:main",
        "vllm-bench": "vllm.entrypoints.cli.bench:main",
    }


def test_sdist_holds_all_that_a_build_needs(tree: Path, tmp_path: Path) -> None:
    run_build(tree, f"build_sdist({str(tmp_path)!r})")
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder, pattern in (
        ("csrc", "*.[ch]*"), ("cmake", "*.c*"), ("vllm", "*.py"), ("examples", "*.json"),
    ):  # fmt: skip
        for path in (ROOT / folder).rglob(pattern):
            assert str(path.relative_to(ROOT)) in names
    for name in ("CMakeLists.txt", "LICENSE", "setup.py", "requirements/constraints.txt"):
        assert name in names
    assert not [
        n for n in names if n.endswith((".so", ".pyc")) or n.startswith(("build/", ".venv"))
    ]


def test_unknown_device_is_refused(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="VLLM_TARGET_DEVICE is 'tpu'; allowed: auto, cpu"):
        run_build(tree, f"build_wheel({str(tmp_path)!r})", device="tpu")


def test_cuda_without_nvcc_is_refused(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(AssertionError, match="VLLM_TARGET_DEVICE=cuda needs nvcc on the PATH"):
        run_build(tree, f"build_wheel({str(tmp_path)!r})", device="cuda")
