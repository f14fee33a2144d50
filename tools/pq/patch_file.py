"""One patch of the series: a git mail with trailers that say why it exists and when it ends.

Written in one canonical form (zero commit id, full blob ids, no diffstat, no signature), so that
exporting what was imported gives the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

ZERO_COMMIT = "0" * 40
REQUIRED_TRAILERS = ("Patch-Name", "Origin", "Forwarded", "Drop-When", "Test")
OPTIONAL_TRAILERS = ("Bug", "Watch")
_TRAILER = re.compile(r"^([A-Z][A-Za-z]*(?:-[A-Z][A-Za-z]*)*): (.+)$")


class PatchError(ValueError):
    """A patch file is not in the form of this series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A parsed patch.

    Attributes:
        name: file name without `.patch`, e.g. `0001-qwen2`.
        subject: one line, `area: what changes`.
        body: why, without the trailers.
        trailers: name -> value.
        diff: the difference itself, from its first `diff --git` line.
    """

    name: str
    author: str
    date: str
    subject: str
    body: str
    trailers: Mapping[str, str]
    diff: bytes

    @property
    def paths(self) -> list[str]:
        """Files that it changes, in order."""
        return re.findall(r"^diff --git a/(\S+) b/\S+$", self.diff.decode(), re.MULTILINE)

    @property
    def num_changed_lines(self) -> int:
        """Lines added and removed."""
        lines = self.diff.decode().splitlines()
        return sum(
            line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- ")) for line in lines
        )

    @property
    def message(self) -> str:
        """The commit message that stands for it."""
        trailers = "\n".join(f"{key}: {value}" for key, value in self.trailers.items())
        return "\n\n".join(part for part in (self.subject, self.body, trailers) if part) + "\n"


def parse_patch(name: str, content: bytes) -> Patch:
    """Read a patch file.

    Raises:
        PatchError: a header or a required trailer is missing.
    """
    head, marker, diff = content.partition(b"\n---\n\n")
    if not marker or not diff.startswith(b"diff --git "):
        raise PatchError(f"{name}: no '---' line followed by a difference")
    fields, _, text = head.decode().partition("\n\n")
    values = {}
    for line in fields.splitlines():
        match = re.match(r"^(From|Date|Subject): (.+)$", line)
        if match:
            values[match[1]] = match[2]
    missing = [key for key in ("From", "Date", "Subject") if key not in values]
    if missing:
        raise PatchError(f"{name}: the header lacks {', '.join(missing)}")
    message = values["Subject"].removeprefix("[PATCH] ") + "\n\n" + text
    return make_patch(name, message, values["From"], values["Date"], diff)


def make_patch(name: str, message: str, author: str, date: str, diff: bytes) -> Patch:
    """Make a patch from a commit message and a difference.

    Raises:
        PatchError: a required trailer is missing or an unknown one is there.
    """
    subject, _, text = message.strip().partition("\n")
    paragraphs = text.strip().split("\n\n")
    trailers: dict[str, str] = {}
    lines = paragraphs[-1].splitlines()
    if lines and all(_TRAILER.match(line) for line in lines):
        paragraphs.pop()
        trailers = dict(line.split(": ", 1) for line in lines)
    missing = [key for key in REQUIRED_TRAILERS if key not in trailers]
    unknown = [key for key in trailers if key not in REQUIRED_TRAILERS + OPTIONAL_TRAILERS]
    if missing or unknown:
        raise PatchError(f"{name}: trailers missing: {missing}, unknown: {unknown}")
    if trailers["Patch-Name"] != name:
        raise PatchError(f"{name}: its Patch-Name says {trailers['Patch-Name']!r}")
    body = "\n\n".join(paragraphs).strip()
    return Patch(
        name=name,
        author=author,
        date=date,
        subject=subject,
        body=body,
        trailers=trailers,
        diff=diff,
    )


def format_patch(patch: Patch) -> bytes:
    """Return the canonical bytes of a patch file."""
    text = patch.message.partition("\n\n")[2].rstrip("\n")
    head = (
        f"From {ZERO_COMMIT} Mon Sep 17 00:00:00 2001\n"
        f"From: {patch.author}\nDate: {patch.date}\nSubject: [PATCH] {patch.subject}\n\n{text}"
    )
    return head.encode() + b"\n---\n\n" + patch.diff
