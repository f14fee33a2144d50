"""The patch queue tool on a small repository of its own: every check must be able to fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.patches.small_fork import AUTHOR, BASE, DATE, OWNED, make_message, run_git
from tools.pq import verbs
from tools.pq.git_store import GitStore
from tools.pq.patch_file import PatchError, format_patch, make_patch, parse_patch
from tools.pq.queue_tree import QueueError, base_of, rebase_series
from tools.pq.series import load_series


def test_verify_passes_on_a_tree_that_fits(fork: Path) -> None:
    assert verbs.verify(fork) == 0


def test_a_stray_file_is_found(fork: Path) -> None:
    (fork / "stray.txt").write_text("nobody claims this\n")
    assert verbs.verify(fork) == 1


def test_an_edited_base_line_is_found(fork: Path) -> None:
    path = fork / "engine.txt"
    path.write_text(path.read_text().replace("line 3\n", "line three\n"))
    assert verbs.verify(fork) == 1


def test_an_edited_hook_does_not_reverse(fork: Path) -> None:
    path = fork / "engine.txt"
    path.write_text(path.read_text().replace("hook\n", "another hook\n"))
    with pytest.raises(QueueError, match="0002-engine does not reverse"):
        verbs.verify(fork)


def test_an_owned_file_may_change_freely(fork: Path) -> None:
    (fork / OWNED).write_text("another window\n")
    (fork / "hybrid" / "more.txt").write_text("more\n")
    assert verbs.verify(fork) == 0


def test_a_patch_that_is_not_listed_is_found(fork: Path) -> None:
    (fork / "patches" / "0003-lost.patch").write_bytes(
        (fork / "patches" / "0001-table.patch").read_bytes()
    )
    with pytest.raises(PatchError, match="not listed"):
        verbs.verify(fork)


def test_a_missing_trailer_is_named() -> None:
    message = make_message("0001-x").replace("Forwarded: not-needed\n", "")
    with pytest.raises(PatchError, match="Forwarded"):
        make_patch("0001-x", message, AUTHOR, DATE, b"diff --git a/x b/x\n")


def test_parse_and_format_agree(fork: Path) -> None:
    content = (fork / "patches" / "0002-engine.patch").read_bytes()
    assert format_patch(parse_patch("0002-engine", content)) == content


def test_shifted_line_numbers_are_not_canonical(fork: Path) -> None:
    path = fork / "patches" / "0002-engine.patch"
    shifted = path.read_text().replace("@@ -19,6 +19,7 @@", "@@ -18,6 +18,7 @@")
    assert shifted != path.read_text()
    path.write_text(shifted)
    assert verbs.verify(fork) == 1
    assert verbs.export(fork, check=True, branch=None) == 1
    assert verbs.export(fork, check=False, branch=None) == 0
    assert verbs.verify(fork) == 0


def test_refresh_takes_an_edit_into_its_patch_only(fork: Path) -> None:
    before = (fork / "patches" / "0001-table.patch").read_bytes()
    path = fork / "engine.txt"
    path.write_text(path.read_text().replace("hook\n", "hook\nsecond line\n"))
    assert verbs.refresh(fork, ["0002-engine"], base=False) == 0
    assert verbs.verify(fork) == 0
    assert b"+second line" in (fork / "patches" / "0002-engine.patch").read_bytes()
    assert (fork / "patches" / "0001-table.patch").read_bytes() == before


def test_refresh_refuses_a_silent_change_of_the_base(fork: Path) -> None:
    path = fork / "engine.txt"
    path.write_text(path.read_text().replace("line 3\n", "line three\n"))
    with pytest.raises(QueueError, match="--base"):
        verbs.refresh(fork, [], base=False)
    assert verbs.refresh(fork, [], base=True) == 0
    assert verbs.verify(fork) == 0


def test_import_and_export_give_the_same_series(fork: Path) -> None:
    before = {p.name: p.read_bytes() for p in (fork / "patches").iterdir()}
    assert verbs.import_series(fork, "pq/test") == 0
    assert verbs.export(fork, check=False, branch="pq/test") == 0
    assert {p.name: p.read_bytes() for p in (fork / "patches").iterdir()} == before


def _new_base(fork: Path, **files: str) -> str:
    """Return the tree of another release of the base."""
    store = GitStore(fork)
    tree = base_of(store, store.working_tree(), load_series(fork))
    for name, text in files.items():
        blob = store.run("hash-object", "-w", "--stdin", data=text.encode()).decode().strip()
        listing = store.text("ls-tree", "-r", tree)
        lines = [x for x in listing.splitlines() if not x.endswith(f"\t{name}")]
        lines.append(f"100644 blob {blob}\t{name}")
        tree = store.run("mktree", data=("\n".join(lines) + "\n").encode()).decode().strip()
    return tree


@pytest.mark.parametrize(
    ("files", "states"),
    [
        ({}, ["clean", "clean"]),
        ({"engine.txt": "new top\n" + BASE["engine.txt"]}, ["clean", "offset"]),
        ({"table.txt": "row full\nrow window\n"}, ["already upstream", "clean"]),
        (
            {"engine.txt": BASE["engine.txt"].replace("line 20\n", "something else\n")},
            ["clean", "conflict"],
        ),
    ],
)
def test_rebase_says_what_became_of_each_patch(
    fork: Path, files: dict[str, str], states: list[str]
) -> None:
    store, series = GitStore(fork), load_series(fork)
    old = base_of(store, store.working_tree(), series)
    rows, _, _ = rebase_series(store, old, _new_base(fork, **files), series.patches)
    assert [row.state for row in rows] == states
    if "engine.txt" in files:
        assert all(row.watched == ("engine.txt",) for row in rows)


def test_rebase_writes_a_branch_that_carries_the_owned_files(fork: Path) -> None:
    new = _new_base(fork, **{"engine.txt": "new top\n" + BASE["engine.txt"]})
    assert verbs.rebase(fork, new, as_json=False, branch="rebased") == 0
    assert run_git(fork, "show", f"rebased:{OWNED}") == "window"
    engine = run_git(fork, "show", "rebased:engine.txt")
    assert engine.startswith("new top") and "hook" in engine


def test_base_is_written_without_hooks_and_owned_files(fork: Path, tmp_path: Path) -> None:
    target = tmp_path / "base"
    assert verbs.checkout_base(fork, target) == 0
    assert {p.name: p.read_text() for p in target.iterdir()} == BASE


def test_report_names_files_and_trailers(fork: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.report(fork, as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)["patches"]
    assert [row["files"] for row in rows] == [["table.txt"], ["engine.txt"]]
    assert rows[0]["changed_lines"] == 1 and rows[0]["drop_when"] == "never"
