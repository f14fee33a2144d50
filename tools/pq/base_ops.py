"""`python -m tools.pq.base_ops FOLDER`: the compiled ops of a base tree written by `pq base`.

Links the objects of this tree's build without those of owned sources, which takes a second; the
library then has no hybrid op, and loading it proves that no other source needs one. Where objects
cannot be taken over, the base compiles its own (minutes).
"""

from __future__ import annotations

import filecmp
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tools.pq.series import load_series

ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = {"_C_cpu.abi3.so": "csrc/cpu", "_C_cuda.abi3.so": "csrc/cuda"}
"""Library -> folder of its sources in the base."""

_SOURCE = re.compile(r"(csrc/\S+)\.o\Z")


def find_link_command(library: str) -> tuple[Path, list[str]] | None:
    """Return the folder of the newest build of this tree and the command that linked a library."""
    ninja = shutil.which("ninja", path=str(Path(sys.executable).parent)) or shutil.which("ninja")
    files = sorted(ROOT.glob("build/**/build.ninja"), key=lambda p: p.stat().st_mtime, reverse=True)
    for file in files if ninja else ():
        target = str(ROOT / "vllm" / library)
        done = subprocess.run(
            [str(ninja), "-C", str(file.parent), "-t", "commands", "-s", target],
            capture_output=True,
            text=True,
            check=False,
        )
        for line in done.stdout.splitlines():
            _, _, command = line.partition(" && ")
            if f"-o {target} " in command:
                words = shlex.split(command.removesuffix(" && :"))
                if all((file.parent / w).is_file() for w in words if _SOURCE.search(w)):
                    return file.parent, words
    return None


def has_same_sources(base: Path, folder: str, words: list[str]) -> bool:
    """Whether the C++ files of the base are those of this tree, and all are among the objects."""
    linked = {match[1] for word in words if (match := _SOURCE.search(word))}
    others = tuple(other for other in _LIBRARIES.values() if other != folder)
    paths = [path.relative_to(base) for path in base.glob("csrc/**/*") if path.is_file()]
    files = [path for path in paths if not str(path).startswith(others)]
    wanted = {str(p) for p in files if p.suffix in (".cpp", ".cu") and str(p).startswith(folder)}
    same = all(filecmp.cmp(base / path, ROOT / path, shallow=False) for path in files)
    return same and wanted <= linked


def link(base: Path, library: str) -> bool:
    """Link a library of the base from objects of this tree's build; whether that could be done."""
    found = find_link_command(library)
    if found is None or not has_same_sources(base, _LIBRARIES[library], found[1]):
        return False
    folder, words = found
    owned = load_series(ROOT).base.owns
    kept = [w for w in words if not ((match := _SOURCE.search(w)) and owned(match[1]))]
    target = str(base.resolve() / "vllm" / library)
    kept = [target if word == str(ROOT / "vllm" / library) else word for word in kept]
    subprocess.run(kept, cwd=folder, check=True)
    print(f"pq base_ops: {library} without {len(words) - len(kept)} objects of owned sources")
    return True


def main() -> int:
    """Provide the libraries that this tree has."""
    base = Path(sys.argv[1])
    built = [library for library in _LIBRARIES if (ROOT / "vllm" / library).is_file()]
    if built and all(link(base, library) for library in built):
        return 0
    print("pq base_ops: no objects to take over; compiling the ops of the base")
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=base, check=False
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
