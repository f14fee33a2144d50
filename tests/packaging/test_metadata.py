"""Version and dependencies: the same from every tree, every range bounded (cases C29, C40)."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.utils.source_tree import ROOT, copy_sources, run_build
from vllm.version import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
TRITON = ROOT / "requirements" / "triton.txt"


def read_metadata_version(tree: Path, work: Path) -> str:
    """Run the metadata step of a build in `tree`, without compiling, and return the version."""
    run_build(tree, f"prepare_metadata_for_build_wheel({str(work)!r})")
    text = next(work.glob("*.dist-info")).joinpath("METADATA").read_text()
    found = re.search(r"^Version: (.+)$", text, re.MULTILINE)
    assert found is not None
    return found.group(1)


@pytest.mark.parametrize("kind", ["full clone", "shallow clone", "no git", "sdist"])
def test_version_is_the_same_from_every_tree(kind: str, tmp_path: Path) -> None:
    tree, work = tmp_path / "tree", tmp_path / "work"
    work.mkdir()
    if "clone" in kind:
        if not (ROOT / ".git").exists():
            pytest.skip("this tree has no git data to clone")
        depth = ["--depth", "1"] if kind == "shallow clone" else []
        clone = ["git", "clone", "--quiet", *depth, ROOT.as_uri(), str(tree)]
        subprocess.run(clone, check=True, timeout=60)
    else:
        copy_sources(tree)
    if kind == "sdist":
        run_build(tree, f"build_sdist({str(work)!r})")
        archive = next(work.glob("*.tar.gz"))
        shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
        tree = next((tmp_path / "unpacked").iterdir())
    version = read_metadata_version(tree, work)
    assert version == __version__
    assert Version(version) >= Version("0.6.3")
    assert Version(version).local is not None


def test_version_of_the_command_is_that_of_the_package() -> None:
    command = [sys.executable, "-m", "vllm.scripts", "--version"]
    shown = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout.strip() == __version__


def all_requirements() -> list[str]:
    project = PROJECT["project"]
    extras = [r for group in project["optional-dependencies"].values() for r in group]
    return [*project["dependencies"], *extras, *PROJECT["build-system"]["requires"]]


@pytest.mark.parametrize("text", all_requirements())
def test_every_dependency_has_both_bounds(text: str) -> None:
    operators = {s.operator for s in Requirement(text).specifier}
    assert operators & {"<", "<=", "==", "~="}, f"{text} has no upper bound"
    assert operators & {">=", ">", "==", "~="}, f"{text} has no lower bound"


def read_constraints() -> dict[str, str]:
    pins = {}
    for line in [*CONSTRAINTS.read_text().splitlines(), *TRITON.read_text().splitlines()]:
        if line and not line.startswith("#"):
            name, exact, version = line.partition("==")
            assert exact, f"{line!r} is no exact pin"
            pins[canonical(name)] = version
    return pins


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_tested_versions_lie_inside_the_ranges() -> None:
    pins = read_constraints()
    optional = PROJECT["project"]["optional-dependencies"]
    not_pinned = {canonical(Requirement(r).name) for key in ("ray", "flash") for r in optional[key]}
    for text in all_requirements():
        requirement = Requirement(text)
        name = canonical(requirement.name)
        if name in not_pinned:
            continue
        assert name in pins, f"{name} has no tested version in constraints.txt"
        assert requirement.specifier.contains(pins[name]), f"{text}: tested with {pins[name]}"


def test_constraints_leave_the_triton_to_torch() -> None:
    """Every CUDA build of torch names one Triton; a pin of another makes torch uninstallable."""
    assert "triton==" not in CONSTRAINTS.read_text()


def test_wheels_are_built_against_the_tested_torch() -> None:
    built = next(r for r in PROJECT["build-system"]["requires"] if r.startswith("torch"))
    assert built == f"torch=={read_constraints()['torch']}"


def list_imports(path: Path) -> set[str]:
    """Return the top-level names of all modules that a file imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module.partition(".")[0])
    return names


def test_imports_are_declared() -> None:
    """Every third-party package that vllm imports is a dependency, or of an extra."""
    declared = {canonical(Requirement(r).name) for r in all_requirements()}
    module_of = {
        "google": "protobuf",
        "yaml": "pyyaml",
        "zmq": "pyzmq",
        "prometheus-client": "prometheus-client",
        "starlette": "fastapi",
        "triton": "torch",
        "uvloop": "uvicorn",
        "xformers": "flash-attn",
    }
    missing = set()
    for path in (ROOT / "vllm").rglob("*.py"):
        for module in list_imports(path):
            if module == "vllm" or module in sys.stdlib_module_names:
                continue
            name = canonical(module)
            if module_of.get(name, name) not in declared:
                missing.add(f"{module} in {path.relative_to(ROOT)}")
    assert not missing
