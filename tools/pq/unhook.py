"""Taking hooks off a tree whose base files were edited since the series was written.

Behind `refresh --base`. A patch that comes off as it is does. Where lines beside a hook have moved
on, its own lines are looked for in the file; where these were edited, the file is merged from three
sides: with the hook as the series knows it, without it, and as it is now. What cannot be merged is
left to a person, as a file with conflict markers.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from tools.pq.change_block import read_blocks, take_off_blocks
from tools.pq.git_store import GitError, GitStore
from tools.pq.patch_file import Patch
from tools.pq.queue_tree import QueueError, reverse_series, strip_owned
from tools.pq.series import FOLDER, Series

WORKBENCH = "build/pq"
_MARKER = b"<<<<<<< "
_SIDES = re.compile(r"^diff --git a/(\S+) b/\S+\nindex ([0-9a-f]{40})\.\.([0-9a-f]{40})", re.M)


def recut_series(
    store: GitStore, tree: str, series: Series, hooks: Collection[str]
) -> tuple[str, tuple[Patch, ...]]:
    """Return the base under `tree`, and the series cut anew between the two.

    Args:
        store: the repository.
        tree: with owned files.
        series: as it was before the edits.
        hooks: patches that take the edits which overlap them.

    Raises:
        QueueError: a hook does not come off; the text says where and what to do.
    """
    _recall_sides(store, series)
    tree = strip_owned(store, tree, series.base)
    patches: list[Patch] = []
    problems: list[str] = []
    for patch in reversed(series.patches):
        before, found = _take_off(store, tree, patch, is_for_hook=patch.name in hooks)
        diff = store.diff(before, tree)
        if not diff and not problems:
            found.append(f"{patch.name} changes nothing any more; remove it from the series")
        patches.append(replace(patch, diff=diff))
        problems += found
        tree = before
    if problems:
        raise QueueError("\n".join(problems))
    return tree, tuple(reversed(patches))


def _recall_sides(store: GitStore, series: Series) -> None:
    """Make the files between two patches known to git: only their ids are in the series."""
    paths = [f"{FOLDER}/BASE.toml", f"{FOLDER}/*.patch"]
    commit = store.text("log", "-1", "--format=%H", "--", *paths)
    if commit:
        try:
            reverse_series(store, strip_owned(store, commit, series.base), series.patches)
        except QueueError:
            return  # the commit was made without refreshing; what is missing is said by name


def _take_off(
    store: GitStore, tree: str, patch: Patch, *, is_for_hook: bool
) -> tuple[str, list[str]]:
    """Return the tree without a hook, and what a person has to decide."""
    mended = _read_mended(store, patch.name)
    conflicts = []
    result = store.apply(tree, patch.diff, reverse=True)
    sides = [] if result.tree else _SIDES.findall(patch.diff.decode())
    tree = result.tree or tree
    for path, without, hooked in sides:
        if path in mended:
            continue
        now = _read(store, tree, path, patch)
        if _MARKER in now:  # a later patch waits for a person; this one is tried again after that
            continue
        content = _take_off_file(store, now, path, (without, hooked), patch, is_for_hook)
        if _MARKER in content:
            place = store.root / WORKBENCH / patch.name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
            conflicts.append(str(place.relative_to(store.root)))
        tree = store.with_content(tree, path, content)
    for path, content in mended.items():
        tree = store.with_content(tree, path, content)
    if not conflicts:
        return tree, []
    return tree, [
        f"{patch.name} does not come off: lines of its hook, or next to it, were edited.\n"
        "If all of these edits belong to the hook, run:\n"
        f"  python -m tools.pq refresh --base {patch.name}\n"
        "Otherwise make these files what they would be without the hook, and run the same "
        f"command again:\n  {' '.join(conflicts)}"
    ]


def _read_mended(store: GitStore, name: str) -> dict[str, bytes]:
    """Return the files that a person has made what they are without a hook."""
    folder = store.root / WORKBENCH / name
    files = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    return {str(p.relative_to(folder)): text for p, text in files.items() if _MARKER not in text}


def _read(store: GitStore, tree: str, path: str, patch: Patch) -> bytes:
    try:
        return store.run("cat-file", "blob", f"{tree}:{path}")
    except GitError:
        raise QueueError(
            f"{patch.name} edits {path}, which is gone; edit or remove the patch"
        ) from None


def _take_off_file(
    store: GitStore, now: bytes, path: str, sides: tuple[str, str], patch: Patch, is_for_hook: bool
) -> bytes:
    """Return a file without a hook, with markers where that is not clear."""
    name = patch.name
    found = take_off_blocks(now.decode(), read_blocks(patch.diff.decode(), path))
    if found is not None:
        return found.encode()
    try:
        without, hooked = (store.run("cat-file", "blob", blob) for blob in sides)
    except GitError:
        raise QueueError(
            f"{name} does not come off, and git does not know {path} as the series knew it; "
            f"refresh in a clone with the whole history, from the last commit of {FOLDER}/ on"
        ) from None
    return _merge(store, now, hooked, without, f"without {name}", is_for_hook)


def _merge(
    store: GitStore, now: bytes, hooked: bytes, without: bytes, label: str, is_for_hook: bool
) -> bytes:
    """Take the step from `hooked` to `without` on `now`; overlaps become `without` for the hook."""
    with tempfile.TemporaryDirectory() as folder:
        names = [Path(folder) / name for name in ("now", "hooked", "without")]
        for name, content in zip(names, (now, hooked, without), strict=True):
            name.write_bytes(content)
        flags = ["--theirs"] if is_for_hook else ["--diff3"]
        labels = ["-L", "now", "-L", "with the hook, before", "-L", label]
        return store.merge_file(*flags, *labels, *map(str, names))
