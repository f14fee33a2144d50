"""Reads one tool call, a JSON object with a name and arguments, character by character.

The arguments' own text is handed on while it arrives, so that it can be streamed; nothing is parsed
twice. Knows nothing of tags or of what surrounds the object.
"""

from __future__ import annotations

import json

_ARGUMENT_KEYS = ("arguments", "parameters")


class JsonCallScanner:
    """A reader of one object.

    Attributes:
        name: the function's name, once it is complete.
        is_done: whether the closing brace was read.
        raw: every character read.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self.has_arguments = False
        self._raw: list[str] = []
        self._arguments: list[str] = []  # not yet taken
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._key: str | None = None  # None while a key is being read
        self._token: list[str] = []  # the key or value being read

    @property
    def raw(self) -> str:
        """Everything read so far."""
        return "".join(self._raw)

    def feed(self, text: str) -> int:
        """Read on; returns how many characters belong to the object."""
        for position, char in enumerate(text):
            self._step(char)
            if self.is_done:
                self._raw.append(text[: position + 1])
                return position + 1
        self._raw.append(text)
        return len(text)

    def take_arguments(self) -> str:
        """Return the text of the arguments that has come since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _step(self, char: str) -> None:
        if self._in_string:
            self._take(char)
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
            self._take(char)
        elif char in "{[":
            self._depth += 1
            if self._depth > 1:
                self._take(char)
        elif char in "}]":
            self._close(char)
        elif self._depth == 1 and char == "," and self._key is not None:
            self._end_value()
        elif self._depth == 1 and char == ":" and self._key is None:
            self._end_key()
        else:
            self._take(char)

    def _close(self, char: str) -> None:
        self._depth -= 1
        if self._depth > 0:
            self._take(char)
        else:
            self._end_value()
            self.is_done = True

    def _take(self, char: str) -> None:
        if not self._token and char.isspace():
            return
        self._token.append(char)
        if self._key in _ARGUMENT_KEYS and self._token[0] in "{[":
            self.has_arguments = True
            # white space behind the closing brace of the arguments is not theirs
            if self._depth > 1 or self._in_string or char in "}]":
                self._arguments.append(char)

    def _end_key(self) -> None:
        self._key = str(_parse(self._token) or "")
        self._token.clear()

    def _end_value(self) -> None:
        key, self._key = self._key, None
        if key == "name":
            value = _parse(self._token)
            self.name = value if isinstance(value, str) else self.name
        elif key in _ARGUMENT_KEYS and self._token and self._token[0] == '"':
            value = _parse(self._token)  # some models write the arguments as a string
            if isinstance(value, str):
                self.has_arguments = True
                self._arguments.append(value)
        self._token.clear()


def _parse(token: list[str]) -> object:
    try:
        return json.loads("".join(token))
    except ValueError:
        return None
