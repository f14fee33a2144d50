"""Trees, patches and commits through git's object store, never through the working tree.

Every operation reads a tree into a temporary index, changes the index and writes a tree back, so
that a check needs no checkout and leaves nothing behind.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class GitError(RuntimeError):
    """A git command failed; the text is git's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """What became of one patch.

    Attributes:
        tree: tree after it, or None where it did not apply.
        message: what git said.
    """

    tree: str | None
    message: str


class GitStore:
    """The object store of one repository.

    Args:
        root: top folder of a working tree.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(
        self, *args: str, data: bytes | None = None, env: Mapping[str, str] | None = None
    ) -> bytes:
        """Run git and return its output.

        Raises:
            GitError: it failed.
        """
        return self._call(args, data, env).stdout

    def _call(
        self, args: tuple[str, ...], data: bytes | None, env: Mapping[str, str] | None
    ) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            ["git", *args],
            cwd=self.root,
            input=data,
            capture_output=True,
            env={**os.environ, **(env or {})},
            check=False,
        )
        if done.returncode:
            raise GitError(done.stderr.decode(errors="replace").strip())
        return done

    def text(self, *args: str) -> str:
        """Run git and return its output as stripped text."""
        return self.run(*args).decode().strip()

    def tree_of(self, revision: str) -> str:
        """Return the tree id of a commit, tag or tree."""
        return self.text("rev-parse", "--verify", f"{revision}^{{tree}}")

    def working_tree(self) -> str:
        """Return the tree of all files in place that git tracks or does not ignore."""
        with self._index(None) as env:
            self.run("add", "--all", env=env)
            return self.run("write-tree", env=env).decode().strip()

    def paths(self, tree: str) -> list[str]:
        """Return every file path of a tree."""
        listing = self.run("ls-tree", "-r", "-z", "--name-only", tree).decode()
        return [path for path in listing.split("\0") if path]

    def without(self, tree: str, paths: list[str]) -> str:
        """Return the tree without some of its files."""
        with self._index(tree) as env:
            if paths:
                names = "\0".join(paths).encode() + b"\0"
                self.run("update-index", "-z", "--force-remove", "--stdin", data=names, env=env)
            return self.run("write-tree", env=env).decode().strip()

    def with_files_of(self, tree: str, source: str, paths: list[str]) -> str:
        """Return `tree` with some files taken from the tree `source`."""
        wanted = set(paths)
        listing = self.run("ls-tree", "-r", "-z", source).split(b"\0")
        lines = [line for line in listing if line and line.split(b"\t", 1)[1].decode() in wanted]
        with self._index(tree) as env:
            if lines:
                data = b"\0".join(lines) + b"\0"
                self.run("update-index", "-z", "--index-info", data=data, env=env)
            return self.run("write-tree", env=env).decode().strip()

    def with_content(self, tree: str, path: str, content: bytes) -> str:
        """Return `tree` with one of its files replaced; its mode stays."""
        mode = self.text("ls-tree", tree, "--", path).partition(" ")[0]
        blob = self.run("hash-object", "-w", "--stdin", data=content).decode().strip()
        with self._index(tree) as env:
            self.run("update-index", "--cacheinfo", f"{mode},{blob},{path}", env=env)
            return self.run("write-tree", env=env).decode().strip()

    def merge_file(self, *args: str) -> bytes:
        """Return what `git merge-file` makes of three files, conflict markers included."""
        done = subprocess.run(
            ["git", "merge-file", "-p", *args], cwd=self.root, capture_output=True, check=False
        )
        if done.returncode < 0 or done.returncode > 127:  # else the number of conflicts
            raise GitError(done.stderr.decode(errors="replace").strip())
        return done.stdout

    def apply(
        self, tree: str, patch: bytes, *, reverse: bool = False, merge: bool = False
    ) -> ApplyResult:
        """Apply a patch to a tree.

        Args:
            tree: tree id to start from.
            patch: a difference in git's form.
            reverse: take it back instead.
            merge: fall back on a three-way merge; the blobs named by the patch must be there.
        """
        flags = ["--reverse"] if reverse else []
        flags += ["--3way"] if merge else []
        with self._index(tree) as env:
            try:
                said = self._call(("apply", "--cached", "--verbose", *flags), patch, env).stderr
                unmerged = self.run("ls-files", "--unmerged", env=env)
                if unmerged:
                    return ApplyResult(tree=None, message="conflict in a three-way merge")
                new = self.run("write-tree", env=env).decode().strip()
            except GitError as error:
                return ApplyResult(tree=None, message=str(error))
        return ApplyResult(tree=new, message=said.decode(errors="replace").strip())

    def diff(self, old: str, new: str, paths: list[str] | None = None) -> bytes:
        """Return the difference of two trees in canonical form: full ids, no renames, 3 lines."""
        flags = ["-r", "-p", "--full-index", "--no-renames", "--no-color", "--no-ext-diff", "-U3"]
        return self.run("diff-tree", *flags, old, new, "--", *(paths or []))

    def changed_paths(self, old: str, new: str) -> list[str]:
        """Return the paths in which two trees differ."""
        flags = ["-r", "-z", "--name-only", "--no-renames"]
        listing = self.run("diff-tree", *flags, old, new).decode()
        return [path for path in listing.split("\0") if path]

    def commit(self, tree: str, parent: str | None, message: str, author: str, date: str) -> str:
        """Write a commit and return its id."""
        name, _, mail = author.rstrip(">").partition(" <")
        who = {
            "GIT_AUTHOR_NAME": name,
            "GIT_AUTHOR_EMAIL": mail,
            "GIT_AUTHOR_DATE": date,
            "GIT_COMMITTER_NAME": name,
            "GIT_COMMITTER_EMAIL": mail,
            "GIT_COMMITTER_DATE": date,
        }
        parents = ["-p", parent] if parent else []
        return (
            self.run("commit-tree", tree, *parents, data=message.encode(), env=who).decode().strip()
        )

    @contextmanager
    def _index(self, tree: str | None) -> Iterator[dict[str, str]]:
        """Yield the environment of a temporary index that holds `tree` (or the current index)."""
        with tempfile.TemporaryDirectory() as folder:
            env = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
            self.run("read-tree", tree or "HEAD", env=env)
            yield env
