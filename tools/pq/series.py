"""The series on disk: BASE.toml, the list of patches, and what the fork owns."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.pq.patch_file import Patch, PatchError, format_patch, parse_patch

FOLDER = "patches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What the fork stands on.

    Attributes:
        tree: id of the base's tree: the tree in place without owned files, the series reversed.
        owned: globs of files that only the fork has; `**` crosses folders.
    """

    name: str
    version: str
    tree: str
    owned: tuple[str, ...]

    def owns(self, path: str) -> bool:
        """Whether the fork owns a file (the series itself counts as owned)."""
        return path.startswith(f"{FOLDER}/") or any(
            re.match(_glob_to_regex(glob), path) for glob in self.owned
        )


def _glob_to_regex(glob: str) -> str:
    """Translate a glob in which `*` stays inside a folder and `**` does not."""
    pieces = re.split(r"(\*\*|\*)", glob)
    words = {"**": ".*", "*": "[^/]*"}
    return "".join(words.get(piece, re.escape(piece)) for piece in pieces) + r"\Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The whole queue."""

    base: Base
    patches: tuple[Patch, ...]


def load_series(root: Path, *, require_canonical: bool = True) -> Series:
    """Read BASE.toml and the patches named in `series`.

    Raises:
        PatchError: a file is missing, unlisted, listed twice or not in canonical form.
    """
    folder = root / FOLDER
    try:
        table = tomllib.loads((folder / "BASE.toml").read_text())
    except OSError as error:
        raise PatchError(f"{FOLDER}/BASE.toml cannot be read: {error.strerror}") from None
    base = Base(
        name=table["name"],
        version=table["version"],
        tree=table["tree"],
        owned=tuple(table["owned"]),
    )
    names = [line.strip() for line in (folder / "series").read_text().splitlines() if line.strip()]
    listed = [name.removesuffix(".patch") for name in names]
    present = {path.stem for path in folder.glob("*.patch")}
    twice = sorted({name for name in listed if listed.count(name) > 1})
    if twice or set(listed) != present:
        raise PatchError(
            f"{FOLDER}/series: listed twice {twice}, without a file "
            f"{sorted(set(listed) - present)}, "
            f"not listed {sorted(present - set(listed))}"
        )
    patches = []
    for name in listed:
        content = (folder / f"{name}.patch").read_bytes()
        patch = parse_patch(name, content)
        if require_canonical and format_patch(patch) != content:
            raise PatchError(f"{name}: not in canonical form; run: python -m tools.pq export")
        patches.append(patch)
    return Series(base=base, patches=tuple(patches))


def write_series(root: Path, patches: tuple[Patch, ...]) -> None:
    """Replace all patch files and the list of them."""
    folder = root / FOLDER
    for path in folder.glob("*.patch"):
        path.unlink()
    for patch in patches:
        (folder / f"{patch.name}.patch").write_bytes(format_patch(patch))
    (folder / "series").write_text("".join(f"{patch.name}.patch\n" for patch in patches))


def write_base_tree(root: Path, tree: str) -> None:
    """Record another base tree in BASE.toml."""
    path = root / FOLDER / "BASE.toml"
    text = re.sub(r'^tree = ".*"$', f'tree = "{tree}"', path.read_text(), flags=re.MULTILINE)
    path.write_text(text)
