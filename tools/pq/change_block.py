"""Hooks found by their own lines, wherever these are now.

Lines around a hook may be edited or indented anew; a hook whose lines are each found together, once
in the file, can still be taken off.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class ChangeBlock:
    """Adjacent lines that a patch removes and adds, without their line ends."""

    removed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)


def read_blocks(diff: str, path: str) -> list[ChangeBlock]:
    """Return the changes that a difference makes to one file, in order."""
    blocks: list[ChangeBlock] = []
    is_inside, is_hunk, is_fresh = False, False, True
    for line in diff.splitlines():
        if line.startswith("diff --git "):
            is_inside, is_hunk = line == f"diff --git a/{path} b/{path}", False
        elif line.startswith("@@ "):
            is_hunk, is_fresh = True, True
        elif is_inside and is_hunk and line[:1] in ("+", "-"):
            if is_fresh:
                blocks.append(ChangeBlock())
                is_fresh = False
            (blocks[-1].added if line[0] == "+" else blocks[-1].removed).append(line[1:])
        else:
            is_fresh = True
    return blocks


def take_off_blocks(content: str, blocks: list[ChangeBlock]) -> str | None:
    """Return a file without the changes; None if one is not found, or more than once.

    Indentation may differ from the patch's by as much on every line, and lines that were added
    together may have been parted.
    """
    lines = content.split("\n")
    for block in blocks:
        if not block.removed and len(_find(lines, block.added)) != 1:
            singles = [ChangeBlock(added=[line]) for line in block.added if line.strip()]
            rest = take_off_blocks("\n".join(lines), singles) if len(block.added) > 1 else None
            if rest is None:
                return None
            lines = rest.split("\n")
            continue
        places = _find(lines, block.added) if block.added else []
        if len(places) != 1:
            return None
        start, shift = places[0]
        restored = [_indent(line, shift) for line in block.removed]
        lines[start : start + len(block.added)] = restored
    return "\n".join(lines)


def _find(lines: list[str], wanted: list[str]) -> list[tuple[int, int]]:
    """Return (index, columns further right) of each place of `wanted`."""
    found = []
    for start in range(len(lines) - len(wanted) + 1):
        shift = _width(lines[start]) - _width(wanted[0])
        pairs = zip(lines[start : start + len(wanted)], wanted, strict=True)
        if all(line == _indent(other, shift) for line, other in pairs):
            found.append((start, shift))
    return found


def _width(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _indent(line: str, shift: int) -> str:
    """Move a line to the right, or to the left as far as it goes."""
    if not line.strip():
        return line
    return " " * shift + line if shift > 0 else re.sub(rf"\A {{0,{-shift}}}", "", line)
