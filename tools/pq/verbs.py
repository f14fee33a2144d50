"""The verbs of `python -m tools.pq`. Each returns an exit code and prints what it did or found."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import tarfile
from pathlib import Path

from tools.pq.git_store import GitStore
from tools.pq.patch_file import Patch, make_patch
from tools.pq.queue_tree import (
    QueueError,
    apply_series,
    base_of,
    canonical_patches,
    rebase_series,
    refresh_patch,
    reverse_series,
    strip_owned,
)
from tools.pq.series import Series, load_series, write_base_tree, write_series
from tools.pq.unhook import WORKBENCH, recut_series

MAX_CHANGED_LINES = 60  # a hook is small; what is larger belongs into an owned file


def verify(root: Path, *, head: bool = False) -> int:
    """Check reverse, forward, canonical form and claims; nothing is written.

    Args:
        root: of the repository.
        head: check the last commit instead of the files in place.
    """
    store, series = GitStore(root), load_series(root)
    tree = store.tree_of("HEAD") if head else store.working_tree()
    hooked = strip_owned(store, tree, series.base)
    base = reverse_series(store, hooked, series.patches)
    problems = []
    if base != series.base.tree:
        problems.append(
            f"the base under the tree in place is {base}, BASE.toml says {series.base.tree}: a "
            "base "
            "file was edited. If that was meant, run: python -m tools.pq refresh --base"
        )
    if apply_series(store, base, series.patches) != hooked:
        problems.append("base + series is not the tree in place")
    if canonical_patches(store, base, series.patches) != series.patches:
        problems.append("the series is not canonical; run: python -m tools.pq export")
    problems += _check_claims(store, base, hooked, series)
    for problem in problems:
        print(f"pq verify: {problem}")
    if not problems:
        num_lines = sum(patch.num_changed_lines for patch in series.patches)
        print(
            f"pq verify: {len(series.patches)} patches, {num_lines} changed lines, forward and "
            "reverse "
            f"agree on base {base[:12]}"
        )
    return 1 if problems else 0


def _check_claims(store: GitStore, base: str, hooked: str, series: Series) -> list[str]:
    """Every difference from the base is claimed by a patch; every patch stays a hook."""
    problems = []
    claimed = {path for patch in series.patches for path in patch.paths}
    changed = set(store.changed_paths(base, hooked))
    if claimed != changed:
        problems.append(
            f"changed but in no patch: {sorted(changed - claimed)}; in a patch but unchanged: "
            f"{sorted(claimed - changed)}"
        )
    for patch in series.patches:
        if patch.num_changed_lines > MAX_CHANGED_LINES:
            problems.append(
                f"{patch.name} changes {patch.num_changed_lines} lines; at most "
                f"{MAX_CHANGED_LINES}: move "
                "logic into an owned file"
            )
        owned = [path for path in patch.paths if series.base.owns(path)]
        if owned:
            problems.append(f"{patch.name} touches owned files {owned}")
        tests = patch.trailers["Test"].split()
        absent = [test for test in tests if not (store.root / test).exists()]
        if absent:
            problems.append(f"{patch.name} names tests that do not exist: {absent}")
    return problems


def export(root: Path, *, check: bool, branch: str | None) -> int:
    """Write the series in canonical form, from itself or from the commits of an imported branch."""
    store, series = GitStore(root), load_series(root, require_canonical=False)
    base = base_of(store, store.working_tree(), series)
    patches = _read_branch(store, branch) if branch else series.patches
    canonical = canonical_patches(store, base, patches)
    if check:
        pairs = zip(canonical, series.patches, strict=False)
        stale = [new.name for new, old in pairs if new != old]
        for name in stale:
            print(f"pq export --check: {name} is not canonical")
        return 1 if stale or len(canonical) != len(series.patches) else 0
    write_series(root, canonical)
    print(f"pq export: {len(canonical)} patches written")
    return 0


def _read_branch(store: GitStore, branch: str) -> tuple[Patch, ...]:
    """Turn the commits of an imported branch (but its first and last) into patches."""
    ids = store.text("rev-list", "--reverse", branch, "--not", "HEAD").split()
    patches = []
    for commit in ids[1:]:
        message = store.text("show", "-s", "--format=%B", commit)
        name = store.text("show", "-s", "--format=%(trailers:key=Patch-Name,valueonly)", commit)
        if not name:
            continue  # the commit that brings the owned files
        author = store.text("show", "-s", "--format=%an <%ae>", commit)
        date = store.text("show", "-s", "--format=%aD", commit)
        diff = store.diff(store.tree_of(f"{commit}^"), store.tree_of(commit))
        patches.append(make_patch(name, message, author, date, diff))
    if not patches:
        raise QueueError(f"{branch} has no commits with a Patch-Name; made by: pq import?")
    return tuple(patches)


def import_series(root: Path, branch: str | None) -> int:
    """Make a branch: the base, a commit for each patch, a commit with the owned files."""
    store, series = GitStore(root), load_series(root)
    tree = store.working_tree()
    base = base_of(store, tree, series)
    name = branch or f"pq/{series.base.version}"
    author, date = "vllm-hybrid <dev@vllm-hybrid.invalid>", "2026-01-01T00:00:00+0000"
    first = f"base: {series.base.name} {series.base.version}\n"
    head = store.commit(base, None, first, author, date)
    current = base
    for patch in series.patches:
        current = apply_series(store, current, (patch,))
        head = store.commit(current, head, patch.message, patch.author, patch.date)
    head = store.commit(tree, head, "owned: the files that only the fork has\n", author, date)
    store.run("update-ref", f"refs/heads/{name}", head)
    print(f"pq import: branch {name} at {head[:12]}, {len(series.patches)} patches on {base[:12]}")
    return 0


def refresh(root: Path, names: list[str], *, base: bool, head: bool = False) -> int:
    """Take edits into the series.

    With `base`, edits between the hooks become part of the base; those that overlap a named hook
    become part of it. Without, everything edited since the last commit becomes part of the named
    patches.

    Args:
        root: of the repository.
        names: patches.
        base: whether the base may change.
        head: read the last commit instead of the files in place.
    """
    store, series = GitStore(root), load_series(root)
    tree = store.tree_of("HEAD") if head else store.working_tree()
    known = [patch.name for patch in series.patches]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise QueueError(f"there is no patch {unknown}; the series has {', '.join(known)}")
    if base:
        new_base, patches = recut_series(store, tree, series, names)
    else:
        patches = series.patches
        for name in names:
            fresh = refresh_patch(store, store.tree_of("HEAD"), tree, series, name)
            patches = tuple(fresh if patch.name == name else patch for patch in patches)
        new_base = reverse_series(store, strip_owned(store, tree, series.base), patches)
        if new_base != series.base.tree:
            raise QueueError(
                f"with {names or 'the series'} the base becomes {new_base}, not "
                f"{series.base.tree}: an edit outside the named patches touches a base file. If "
                "that was meant, add --base"
            )
        patches = canonical_patches(store, new_base, patches)
    write_series(root, patches)
    write_base_tree(root, new_base)
    shutil.rmtree(root / WORKBENCH, ignore_errors=True)
    print(f"pq refresh: {', '.join(names) or 'no hook named'}; base {new_base[:12]}")
    return 0


def add(root: Path, name: str, message: str, paths: list[str]) -> int:
    """Make a new patch of what was edited in some files since the last commit."""
    store, series = GitStore(root), load_series(root)
    if name in [patch.name for patch in series.patches]:
        raise QueueError(f"there is a patch {name!r} already; run: refresh --base {name}")
    tree = store.working_tree()
    diff = store.diff(store.with_files_of(tree, "HEAD", paths), tree)
    if not diff:
        raise QueueError(f"nothing was edited in {', '.join(paths)} since the last commit")
    like = series.patches[-1]
    new = make_patch(name, message, like.author, like.date, diff)
    write_series(root, tuple(sorted((*series.patches, new), key=lambda patch: patch.name)))
    print(f"pq add: {name}; now run: python -m tools.pq refresh --base")
    return 0


def rebase(root: Path, onto: str, *, as_json: bool, branch: str | None) -> int:
    """Try the series on another base; with a branch, also write the result there."""
    store, series = GitStore(root), load_series(root)
    tree = store.working_tree()
    old_base, new_base = base_of(store, tree, series), store.tree_of(onto)
    rows, kept, after = rebase_series(store, old_base, new_base, series.patches)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        for row in rows:
            watch = f"  re-read: {', '.join(row.watched)}" if row.watched else ""
            detail = row.detail.strip().rpartition("\n")[2]
            print(f"{row.name:32} {row.state:16} {detail}{watch}")
    failed = any(row.state in ("conflict", "target missing") for row in rows)
    if branch and not failed:
        owned = [path for path in store.paths(tree) if series.base.owns(path)]
        result = store.with_files_of(after, tree, owned)
        head = store.commit(
            result,
            store.text("rev-parse", "HEAD"),
            f"rebase: {len(kept)} patches onto {onto}\n",
            "vllm-hybrid <dev@vllm-hybrid.invalid>",
            "2026-01-01T00:00:00+0000",
        )
        store.run("update-ref", f"refs/heads/{branch}", head)
        print(f"pq rebase: branch {branch} at {head[:12]}")
    return 1 if failed else 0


def report(root: Path, *, as_json: bool) -> int:
    """Print one row a patch."""
    series = load_series(root)
    rows = [
        {
            "name": patch.name,
            "subject": patch.subject,
            "files": patch.paths,
            "changed_lines": patch.num_changed_lines,
            **{key.lower().replace("-", "_"): value for key, value in patch.trailers.items()},
        }
        for patch in series.patches
    ]
    if as_json:
        print(json.dumps({"base": dataclasses.asdict(series.base), "patches": rows}, indent=1))
        return 0
    print(f"base {series.base.name} {series.base.version}, tree {series.base.tree[:12]}")
    for patch in series.patches:
        files = ", ".join(patch.paths)
        print(f"{patch.name:32} {patch.num_changed_lines:4} lines  {files}")
    return 0


def checkout_base(root: Path, target: Path, *, head: bool = False) -> int:
    """Write the files of the base tree into an empty folder.

    Args:
        root: of the repository.
        target: the folder.
        head: read the last commit instead of the files in place.
    """
    store, series = GitStore(root), load_series(root)
    tree = store.tree_of("HEAD") if head else store.working_tree()
    base, _ = recut_series(store, tree, series, hooks=())
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise QueueError(f"{target} is not empty; name an empty or a new folder")
    archive = store.run("archive", "--format=tar", base)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(target, filter="data")
    print(f"pq base: {base[:12]} written to {target}")
    return 0
