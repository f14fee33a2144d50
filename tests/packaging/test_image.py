"""The image runs what the GPU tests ran with."""

from __future__ import annotations

import json
import re
import shlex
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.utils.source_tree import ROOT

DOCKERFILE = ROOT / "Dockerfile"
README = ROOT / "README.md"
GPU_TESTS = ROOT / "benchmarks" / "results" / "h200_tests.json"

pytestmark = pytest.mark.skipif(
    not (DOCKERFILE.exists() and GPU_TESTS.exists()), reason="an sdist holds neither"
)


def read_torch() -> str:
    """Return the torch version that the CUDA image takes unless told otherwise."""
    (version,) = re.findall(r"^ARG TORCH_VERSION=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    return str(version)


def test_torch_and_triton_of_the_image_are_those_of_the_gpu_tests() -> None:
    tested = json.loads(GPU_TESTS.read_text())["versions"]
    assert read_torch() == tested["torch"].partition("+")[0]
    pin = (ROOT / "requirements" / "triton.txt").read_text().splitlines()[-1]
    assert pin == f"triton=={tested['triton']}"


def test_readme_installs_that_torch_and_what_builds_without_isolation_need() -> None:
    command = re.search(r"^\$ pip install (torch==.*?)(?: +#|$)", README.read_text(), re.MULTILINE)
    assert command is not None
    given = {r.name: r for r in map(Requirement, shlex.split(command[1]))}
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert set(given) == {Requirement(r).name for r in needed}
    assert given["torch"].specifier.contains(read_torch())


def test_torch_of_the_image_lies_in_the_range() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = next(r for r in map(Requirement, dependencies) if r.name == "torch")
    assert wanted.specifier.contains(read_torch())


def test_every_stage_declares_the_arguments_it_uses() -> None:
    """An ARG above the first FROM is empty behind it unless it is named again."""
    _, *stages = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE)
    for stage in stages:
        head, _, body = stage.partition("\n")
        known = set(re.findall(r"^(?:ARG|ENV) (\w+)", body, re.MULTILINE))
        used = set(re.findall(r"\$\{(\w+)\}", body))
        assert used <= known, f"FROM {head}: {used - known} are not declared"
