"""Builds the compiled ops through CMake; all else about the package stands in pyproject.toml.

Environment: VLLM_TARGET_DEVICE = auto (default) | cpu | cuda | empty; MAX_JOBS = compiler processes
at once; CMAKE_BUILD_TYPE = Release (default) | RelWithDebInfo | Debug; CMAKE_ARGS = more arguments
for cmake.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
DEVICES = ("auto", "cpu", "cuda", "empty")


def find_nvcc() -> str | None:
    """Return the path of nvcc, from CUDA_HOME or the PATH."""
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin" / "nvcc").is_file():
        return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc")


def has_cuda_torch() -> bool:
    """Return whether the torch of this environment is a CUDA build, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return runpy.run_path(str(Path(spec.origin).parent / "version.py"))["cuda"] is not None


def resolve_device() -> str:
    """Return which libraries are built: "cpu", "cuda" (both libraries) or "empty" (none).

    auto takes cuda where nvcc and a CUDA build of torch are there, else cpu; "empty" off Linux,
    since the package then only serves to read configs and clients. An explicit cuda needs nvcc
    alone: the library can be built beside a CPU torch for use beside another.
    """
    asked = os.environ.get("VLLM_TARGET_DEVICE", "auto").strip().lower()
    if asked not in DEVICES:
        raise SystemExit(f"VLLM_TARGET_DEVICE is {asked!r}; allowed: {', '.join(DEVICES)}")
    if not sys.platform.startswith("linux"):
        return "empty"
    if asked != "empty" and platform.machine() not in ("x86_64", "AMD64"):
        raise SystemExit(
            f"the compiled ops need an x86-64 processor, this is {platform.machine()}; "
            "VLLM_TARGET_DEVICE=empty installs the package without them"
        )
    if asked == "auto":
        return "cuda" if find_nvcc() and has_cuda_torch() else "cpu"
    if asked == "cuda" and not find_nvcc():
        raise SystemExit(
            "VLLM_TARGET_DEVICE=cuda needs nvcc on the PATH or in CUDA_HOME/bin, and there is "
            "none; install the CUDA toolkit, or build with VLLM_TARGET_DEVICE=cpu"
        )
    return asked


DEVICE = resolve_device()
LIBRARIES = {"empty": (), "cpu": ("_C_cpu",), "cuda": ("_C_cpu", "_C_cuda")}[DEVICE]


def count_jobs() -> int:
    """Return how many compiler processes run at once."""
    asked = os.environ.get("MAX_JOBS")
    return max(1, int(asked)) if asked else len(os.sched_getaffinity(0))


def drop_stale_cache(work: Path, tools: list[str]) -> None:
    """Empty CMake's folder if it was made with other tools, as every isolated build of pip's is.

    CMake keeps the paths it found first, also of an environment that is gone.
    """
    cache = work / "CMakeCache.txt"
    if cache.is_file() and not all(tool in cache.read_text() for tool in tools):
        shutil.rmtree(work)


class CMakeBuild(build_ext):
    """Configures once and lets CMake build every library into the package folder."""

    def run(self) -> None:
        """Build all libraries with one call of CMake."""
        if not LIBRARIES:
            return
        cmake = shutil.which("cmake")
        if cmake is None:
            raise SystemExit(
                "cmake is needed to build the ops and was not found; pip install cmake ninja"
            )
        package = ROOT / "vllm" if self.inplace else Path(self.build_lib).resolve() / "vllm"
        ninja = shutil.which("ninja")
        work = Path(self.build_temp).resolve() / "cmake"
        drop_stale_cache(work, [cmake, sys.executable, *([ninja] if ninja else [])])
        work.mkdir(parents=True, exist_ok=True)
        package.mkdir(parents=True, exist_ok=True)
        configure = [
            cmake,
            "-S",
            str(ROOT),
            "-B",
            str(work),
            f"-DCMAKE_BUILD_TYPE={os.environ.get('CMAKE_BUILD_TYPE', 'Release')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DVLLM_TARGET_DEVICE={DEVICE}",
            f"-DVLLM_OUTPUT_DIR={package}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        if ninja:
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        if DEVICE == "cuda" and (nvcc := find_nvcc()):
            configure.append(f"-DCMAKE_CUDA_COMPILER={nvcc}")
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(work), "--parallel", str(count_jobs())], check=True)
        missing = [name for name in LIBRARIES if not (package / f"{name}.abi3.so").is_file()]
        if missing:
            raise SystemExit(f"cmake ended without an error but did not build {missing}")

    def get_ext_filename(self, fullname: str) -> str:
        """Return the file name CMake gives a library."""
        return fullname.replace(".", os.sep) + ".abi3.so"


class Wheel(bdist_wheel):
    """Tags the wheel by platform only: the libraries use neither Python's ABI nor one torch's."""

    def run(self) -> None:
        """Build from an empty staging folder, so that nothing of an earlier build gets in."""
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return py3-none-PLATFORM, or py3-none-any when nothing is compiled."""
        _, _, platform = super().get_tag()
        return ("py3", "none", platform if LIBRARIES else "any")


class PackageWithOps(Distribution):
    """A distribution that is platform specific exactly when libraries are built."""

    def has_ext_modules(self) -> bool:
        """Return whether anything is compiled."""
        return bool(LIBRARIES)


setup(
    distclass=PackageWithOps,
    ext_modules=[Extension(f"vllm.{name}", sources=[]) for name in LIBRARIES],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel},
)
