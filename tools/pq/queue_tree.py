"""Between the tree in place and the base: the series forwards and backwards.

Pure functions over tree ids; the verbs in `verbs.py` print what they find.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.pq.git_store import GitStore
from tools.pq.patch_file import Patch
from tools.pq.series import Base, Series


class QueueError(RuntimeError):
    """The series and the tree do not fit together; the text names the patch and the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebaseRow:
    """What became of one patch on another base.

    Attributes:
        state: clean, offset, three-way, already upstream, target missing or conflict.
        detail: git's words where it is not clean.
        watched: watched files that differ between the bases.
    """

    name: str
    state: str
    detail: str = ""
    watched: tuple[str, ...] = ()


def strip_owned(store: GitStore, tree: str, base: Base) -> str:
    """Return the tree without the files that the fork owns."""
    return store.without(tree, [path for path in store.paths(tree) if base.owns(path)])


def reverse_series(store: GitStore, tree: str, patches: tuple[Patch, ...]) -> str:
    """Take the patches back, last first.

    Raises:
        QueueError: one does not come off.
    """
    for patch in reversed(patches):
        result = store.apply(tree, patch.diff, reverse=True)
        if result.tree is None:
            raise QueueError(
                f"{patch.name} does not reverse: {_last_line(result.message)}\n"
                "Run: python -m tools.pq refresh --base"
            )
        tree = result.tree
    return tree


def _last_line(message: str) -> str:
    return message.strip().rpartition("\n")[2]


def apply_series(store: GitStore, tree: str, patches: tuple[Patch, ...]) -> str:
    """Put the patches on, first first.

    Raises:
        QueueError: one does not apply.
    """
    for patch in patches:
        result = store.apply(tree, patch.diff)
        if result.tree is None:
            raise QueueError(f"{patch.name} does not apply: {result.message}")
        tree = result.tree
    return tree


def base_of(store: GitStore, tree: str, series: Series) -> str:
    """Return the base tree under a tree in place."""
    return reverse_series(store, strip_owned(store, tree, series.base), series.patches)


def refresh_patch(store: GitStore, old: str, new: str, series: Series, name: str) -> Patch:
    """Recompute one patch so that it carries the edits between two trees in place.

    Args:
        store: the repository.
        old: tree on which the series verifies (the last commit).
        new: tree with the edits.
        series: as it was before the edits.
        name: the patch that the edits belong to.

    Raises:
        QueueError: the edits overlap a later patch, or there is no such patch.
    """
    names = [patch.name for patch in series.patches]
    if name not in names:
        raise QueueError(f"there is no patch {name!r}; the series has {', '.join(names)}")
    index = names.index(name)
    before = apply_series(store, base_of(store, old, series), series.patches[:index])
    after = reverse_series(store, strip_owned(store, new, series.base), series.patches[index + 1 :])
    patch = series.patches[index]
    return Patch(
        name=patch.name,
        author=patch.author,
        date=patch.date,
        subject=patch.subject,
        body=patch.body,
        trailers=patch.trailers,
        diff=store.diff(before, after),
    )


def canonical_patches(
    store: GitStore, base_tree: str, patches: tuple[Patch, ...]
) -> tuple[Patch, ...]:
    """Return the patches with differences computed anew from `base_tree` (exact line numbers)."""
    result, tree = [], base_tree
    for patch in patches:
        after = apply_series(store, tree, (patch,))
        result.append(
            Patch(
                name=patch.name,
                author=patch.author,
                date=patch.date,
                subject=patch.subject,
                body=patch.body,
                trailers=patch.trailers,
                diff=store.diff(tree, after),
            )
        )
        tree = after
    return tuple(result)


def rebase_series(
    store: GitStore, old_base: str, new_base: str, patches: tuple[Patch, ...]
) -> tuple[list[RebaseRow], list[Patch], str]:
    """Move the series to another base; stops at nothing, so that one run lists everything.

    Returns:
        a row for each patch, the patches that survive (differences anew), and the tree after them.
    """
    moved = set(store.changed_paths(old_base, new_base))
    present = set(store.paths(new_base))
    rows, kept, tree = [], [], new_base
    for patch in patches:
        watched = tuple(p for p in patch.trailers.get("Watch", "").split() if p in moved)
        state, detail, after = _try_patch(store, tree, patch, present)
        rows.append(RebaseRow(name=patch.name, state=state, detail=detail, watched=watched))
        if after is None or state == "already upstream":
            continue
        diff = store.diff(tree, after)
        kept.append(
            Patch(
                name=patch.name,
                author=patch.author,
                date=patch.date,
                subject=patch.subject,
                body=patch.body,
                trailers=patch.trailers,
                diff=diff,
            )
        )
        tree = after
    return rows, kept, tree


def _try_patch(
    store: GitStore, tree: str, patch: Patch, present: set[str]
) -> tuple[str, str, str | None]:
    result = store.apply(tree, patch.diff)
    if result.tree is not None:
        offset = "offset" in result.message
        return ("offset" if offset else "clean"), "", result.tree
    missing = [path for path in patch.paths if path not in present]
    if missing:
        return "target missing", f"not in the new base: {', '.join(missing)}", None
    if store.apply(tree, patch.diff, reverse=True).tree is not None:
        return "already upstream", "the new base has it; drop the patch", tree
    merged = store.apply(tree, patch.diff, merge=True)
    if merged.tree is not None:
        return "three-way", "", merged.tree
    return "conflict", result.message, None
