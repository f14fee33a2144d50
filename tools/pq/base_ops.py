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

from tools.pq.git_store import GitError
from tools.pq.series import load_series

ROOT = Path(__file__).resolve().parents[2]
_LIBRARY = "_C_cpu.abi3.so"
_SOURCE = re.compile(r"(csrc/\S+)\.o\Z")


def find_link_command() -> tuple[Path, list[str]] | None:
    """Return the folder of the newest build of this tree and the command that linked its ops."""
    ninja = shutil.which("ninja", path=str(Path(sys.executable).parent)) or shutil.which("ninja")
    files = sorted(ROOT.glob("build/**/build.ninja"), key=lambda p: p.stat().st_mtime, reverse=True)
    for file in files if ninja else ():
        library = str(ROOT / "vllm" / _LIBRARY)
        done = subprocess.run(
            [str(ninja), "-C", str(file.parent), "-t", "commands", "-s", library],
            capture_output=True,
            text=True,
            check=False,
        )
        for line in done.stdout.splitlines():
            _, _, command = line.partition(" && ")
            if f"-o {library} " in command:
                words = shlex.split(command.removesuffix(" && :"))
                if all((file.parent / w).is_file() for w in words if _SOURCE.search(w)):
                    return file.parent, words
    return None


def has_same_sources(base: Path, words: list[str]) -> bool:
    """Whether all C++ files of the base are those of this tree, and all are among the objects."""
    linked = {match[1] for word in words if (match := _SOURCE.search(word))}
    sources = [p.relative_to(base) for p in base.glob("csrc/**/*") if p.is_file()]
    wanted = {str(p) for p in sources if p.suffix == ".cpp"}
    same = all(filecmp.cmp(base / path, ROOT / path, shallow=False) for path in sources)
    return same and wanted <= linked


def link(base: Path, folder: Path, words: list[str]) -> int:
    """Link the ops of the base; returns the number of objects left out."""
    owned = load_series(ROOT).base.owns
    kept = [w for w in words if not ((match := _SOURCE.search(w)) and owned(match[1]))]
    target = str(base.resolve() / "vllm" / _LIBRARY)
    kept = [target if word == str(ROOT / "vllm" / _LIBRARY) else word for word in kept]
    subprocess.run(kept, cwd=folder, check=True)
    return len(words) - len(kept)


def main() -> int:
    """Provide the ops."""
    base = Path(sys.argv[1])
    found = find_link_command()
    if found is not None and has_same_sources(base, found[1]):
        num_left_out = link(base, *found)
        print(f"pq base_ops: linked without {num_left_out} objects of owned sources")
        return 0
    print("pq base_ops: no objects to take over; compiling the ops of the base")
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=base, check=False
    )
    return done.returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GitError as error:
        sys.exit(f"pq base_ops: {error}")
