"""Refreshing a series after edits beside hooks, of hooks, and where only a person can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patches.small_fork import make_message
from tools.pq import verbs
from tools.pq.change_block import ChangeBlock, take_off_blocks
from tools.pq.queue_tree import QueueError


def edit(fork: Path, old: str, new: str) -> None:
    path = fork / "engine.txt"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def read_patch(fork: Path, name: str) -> str:
    return (fork / "patches" / f"{name}.patch").read_text()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("line 20\nhook\nline 21\n", "line twenty\nhook\nline twenty-one\n"),
        ("line 20\nhook\nline 21\n", "line 20\nif so:\n    hook\nline 21\n"),
        ("line 20\nhook\nline 21\n", "line 21\nline 20\nhook\n"),
        ("line 3\n", ""),
    ],
)
def test_a_hook_comes_off_when_its_neighbours_were_edited(fork: Path, old: str, new: str) -> None:
    edit(fork, old, new)
    assert verbs.refresh(fork, [], base=True) == 0
    assert verbs.verify(fork) == 0
    changed = [x for x in read_patch(fork, "0002-engine").splitlines() if x[:1] in ("+", "-")]
    assert [line.replace(" ", "") for line in changed[3:]] == ["+hook"]  # after --- and two names


def test_an_edited_hook_asks_and_takes_the_edit_when_told(fork: Path) -> None:
    edit(fork, "line 3\n", "line three\n")
    edit(fork, "hook\n", "another hook\n")
    before = read_patch(fork, "0002-engine")
    with pytest.raises(QueueError, match="refresh --base 0002-engine"):
        verbs.refresh(fork, [], base=True)
    assert read_patch(fork, "0002-engine") == before
    assert verbs.refresh(fork, ["0002-engine"], base=True) == 0
    assert verbs.verify(fork) == 0
    assert "+another hook" in read_patch(fork, "0002-engine")
    assert "three" not in read_patch(fork, "0001-table")


def test_a_file_that_a_person_has_mended_is_taken(fork: Path, tmp_path: Path) -> None:
    edit(fork, "line 20\nhook\nline 21\n", "line 20 with another hook\nline 21\n")
    with pytest.raises(QueueError, match=r"build/pq/0002-engine/engine\.txt"):
        verbs.refresh(fork, [], base=True)
    place = fork / "build" / "pq" / "0002-engine" / "engine.txt"
    assert "<<<<<<< now" in place.read_text()
    place.write_text((fork / "engine.txt").read_text().replace(" with another hook", ""))
    assert verbs.refresh(fork, [], base=True) == 0
    assert not place.exists()
    assert verbs.verify(fork) == 0
    assert verbs.checkout_base(fork, tmp_path / "base") == 0
    assert "hook" not in (tmp_path / "base" / "engine.txt").read_text()


def test_lines_of_the_base_can_be_moved_into_a_hook(fork: Path) -> None:
    edit(fork, "line 30\n", "line 30\nsecond hook\n")
    assert verbs.refresh(fork, [], base=True) == 0  # first they are the base's
    place = fork / "build" / "pq" / "0001-table" / "engine.txt"
    place.parent.mkdir(parents=True)
    without = (fork / "engine.txt").read_text().replace("hook\n", "").replace("second ", "")
    place.write_text(without)
    assert verbs.refresh(fork, [], base=True) == 0
    assert verbs.verify(fork) == 0
    assert "+second hook" in read_patch(fork, "0001-table")


def test_a_hook_in_a_file_that_is_gone_is_named(fork: Path) -> None:
    (fork / "table.txt").unlink()
    with pytest.raises(QueueError, match=r"0001-table edits table\.txt, which is gone"):
        verbs.refresh(fork, [], base=True)


@pytest.mark.parametrize("name", ["0003-last", "0001-x"])
def test_a_new_hook_becomes_a_patch(fork: Path, name: str) -> None:
    edit(fork, "line 30\n", "line 30\nnew hook\n")
    message = make_message(name)
    with pytest.raises(QueueError, match="there is a patch"):
        verbs.add(fork, "0002-engine", message, ["engine.txt"])
    with pytest.raises(QueueError, match="nothing was edited"):
        verbs.add(fork, name, message, ["table.txt"])
    assert verbs.add(fork, name, message, ["engine.txt"]) == 0
    assert verbs.refresh(fork, [], base=True) == 0
    assert verbs.verify(fork) == 0
    assert "+new hook" in read_patch(fork, name)
    listed = (fork / "patches" / "series").read_text().split()
    assert listed == sorted(listed) and len(listed) == 3


def test_the_last_commit_is_read_when_asked(fork: Path) -> None:
    edit(fork, "line 3\n", "line three\n")
    assert verbs.verify(fork, head=True) == 0
    assert verbs.verify(fork) == 1


def test_blocks_that_are_there_twice_are_left_alone() -> None:
    block = ChangeBlock(removed=["old"], added=["new"])
    assert take_off_blocks("a\nnew\n", [block]) == "a\nold\n"
    assert take_off_blocks("a\n  new\n", [block]) == "a\n  old\n"
    assert take_off_blocks("new\nnew\n", [block]) is None
    assert take_off_blocks("a\n", [block]) is None
    pair = ChangeBlock(added=["one", "two"])
    assert take_off_blocks("one\na\n  two\n", [pair]) == "a\n"
    assert take_off_blocks("one\na\n", [pair]) is None
    assert take_off_blocks("a\n", [ChangeBlock(removed=["old"])]) is None
