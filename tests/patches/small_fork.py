"""A repository of its own: a base of three files, two hooks, one owned file, and the series."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.pq.git_store import GitStore
from tools.pq.patch_file import make_patch
from tools.pq.series import write_series

AUTHOR, DATE = "Fork <fork@example.invalid>", "Thu, 1 Jan 2026 00:00:00 +0000"
BASE = {
    "engine.txt": "".join(f"line {i}\n" for i in range(40)),
    "table.txt": "row full\n",
    "test.txt": "a test\n",
}
OWNED = "hybrid/window.txt"


def make_message(name: str) -> str:
    return (
        f"table: {name}\n\nBecause the fork needs it.\n\nPatch-Name: {name}\nOrigin: fork\n"
        "Forwarded: not-needed\nDrop-When: never\nTest: test.txt\nWatch: engine.txt\n"
    )


def run_git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit_all(root: Path, message: str) -> None:
    run_git(root, "add", "-A")
    run_git(root, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", message)


def build_fork(root: Path) -> Path:
    """Make the repository in `root` and return it."""
    root.mkdir()
    run_git(root, "init", "-q", "-b", "main")
    (root / ".git" / "info" / "exclude").write_text("build/\n")
    for name, text in BASE.items():
        (root / name).write_text(text)
    commit_all(root, "base")
    store = GitStore(root)
    trees = [store.tree_of("HEAD")]
    (root / "table.txt").write_text("row full\nrow window\n")
    trees.append(store.working_tree())
    engine = BASE["engine.txt"].replace("line 20\n", "line 20\nhook\n")
    (root / "engine.txt").write_text(engine)
    trees.append(store.working_tree())
    (root / "hybrid").mkdir()
    (root / OWNED).write_text("window\n")
    folder = root / "patches"
    folder.mkdir()
    (folder / "BASE.toml").write_text(
        f'name = "base"\nversion = "1"\ntree = "{trees[0]}"\nowned = ["hybrid/**"]\n'
    )
    patches = tuple(
        make_patch(name, make_message(name), AUTHOR, DATE, store.diff(trees[i], trees[i + 1]))
        for i, name in enumerate(["0001-table", "0002-engine"])
    )
    write_series(root, patches)
    commit_all(root, "fork")
    return root
