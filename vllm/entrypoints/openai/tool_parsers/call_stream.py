"""Splits a model's answer into text and tool calls while it arrives.

Every built-in parser is one `CallFormat`; a whole answer is read by the same machine as a stream,
so both give the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm.entrypoints.openai.response import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    make_tool_call_id,
)
from vllm.entrypoints.openai.tool_parsers.json_call_scanner import JsonCallScanner


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes tool calls.

    Attributes:
        opener: mark that begins calls, "" for none.
        between: characters that may stand around and between the objects.
        is_bare_allowed: calls may begin without the opener, at the very start of the answer.
        is_opener_repeated: every call has its own opener; else one opens all.
        needs_arguments: an object without arguments is no call.
        make_id: makes the id of a call.
    """

    opener: str
    between: str = " \n\r\t"
    is_bare_allowed: bool = False
    is_opener_repeated: bool = False
    needs_arguments: bool = False
    make_id: Callable[[], str] = make_tool_call_id


class CallStream:
    """Reads one answer.

    Attributes:
        num_calls: calls begun so far.
        is_incomplete: whether the text read so far ends inside a call.
    """

    def __init__(self, call_format: CallFormat) -> None:
        self.num_calls = 0
        self._format = call_format
        self._buffer = ""  # not yet read
        self._skipped = ""  # marks that were read and lead to a call, or are text after all
        self._scanner: JsonCallScanner | None = None
        self._is_named = False  # the current call's name was given out
        self._step = self._at_start if call_format.is_bare_allowed else self._seek_opener
        self._content: list[str] = []
        self._calls: list[DeltaToolCall] = []

    @property
    def is_incomplete(self) -> bool:
        """Whether the answer stops inside a call."""
        return self._scanner is not None

    def feed(self, text: str) -> DeltaMessage | None:
        """Read on; returns what is new, or None."""
        self._buffer += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> DeltaMessage | None:
        """End the answer; returns text that was held back because it could have begun a call."""
        held = self._scanner.raw if self._scanner is not None and not self._is_named else ""
        self._emit_text(self._skipped + held + self._buffer)
        self._buffer = self._skipped = ""
        return self._take()

    def _take(self) -> DeltaMessage | None:
        content = "".join(self._content)
        calls, self._calls = self._calls, []
        self._content.clear()
        if not content and not calls:
            return None
        return DeltaMessage(content=content or None, tool_calls=calls or None)

    # Each step reads from the buffer and returns whether there is more to do.

    def _at_start(self) -> bool:
        text = self._buffer.lstrip()
        opener = self._format.opener
        if not text or (opener and len(text) < len(opener) and opener.startswith(text)):
            return False
        if opener and text.startswith(opener):
            self._skip_to(text[len(opener) :])
            self._step = self._seek_object
        elif text[0] in "{[":
            self._step = self._seek_object
        else:
            self._step = self._pass_text
        return True

    def _seek_opener(self) -> bool:
        opener = self._format.opener
        found = self._buffer.find(opener)
        if found >= 0:
            self._emit_text(self._buffer[:found])
            self._buffer = self._buffer[found:]
            self._skip_to(self._buffer[len(opener) :])
            self._step = self._seek_object
            return True
        kept = _overlap(self._buffer, opener)
        self._emit_text(self._buffer[: len(self._buffer) - kept])
        self._buffer = self._buffer[len(self._buffer) - kept :]
        return False

    def _seek_object(self) -> bool:
        text = self._buffer.lstrip(self._format.between)
        self._skip_to(text)
        if not text:
            return False
        if text[0] == "{":
            self._scanner = JsonCallScanner()
            self._is_named = False
            self._step = self._read_object
        else:
            self._emit_skipped()
            self._step = self._seek_opener if self._format.is_opener_repeated else self._pass_text
        return True

    def _skip_to(self, rest: str) -> None:
        """Go on with `rest`, the end of the buffer."""
        self._skipped += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest

    def _emit_skipped(self) -> None:
        skipped, self._skipped = self._skipped, ""
        self._emit_text(skipped)

    def _read_object(self) -> bool:
        scanner = self._scanner
        assert scanner is not None, "an object is read only after its brace was seen"
        num_read = scanner.feed(self._buffer)
        self._buffer = self._buffer[num_read:]
        self._emit_call(scanner)
        if not scanner.is_done:
            return False
        self._scanner = None
        if not self._is_named:  # some other JSON, not a call
            self._emit_skipped()
            self._emit_text(scanner.raw)
            self._step = self._pass_text
        else:
            self._step = self._seek_opener if self._format.is_opener_repeated else self._seek_object
        return True

    def _pass_text(self) -> bool:
        self._emit_text(self._buffer)
        self._buffer = ""
        return False

    def _emit_text(self, text: str) -> None:
        if not self.num_calls:  # text behind a call is not part of the answer
            self._content.append(text)

    def _emit_call(self, scanner: JsonCallScanner) -> None:
        can_be_named = scanner.has_arguments or (
            scanner.is_done and not self._format.needs_arguments
        )
        if scanner.name is None or not can_be_named:
            return
        arguments = scanner.take_arguments()
        if not self._is_named:
            self._is_named = True
            self._skipped = ""
            self.num_calls += 1
            if not scanner.has_arguments:
                arguments = "{}"
            self._calls.append(
                DeltaToolCall(
                    index=self.num_calls - 1,
                    id=self._format.make_id(),
                    type="function",
                    function=DeltaFunctionCall(name=scanner.name, arguments=arguments),
                )
            )
        elif arguments:
            self._calls.append(
                DeltaToolCall(
                    index=self.num_calls - 1, function=DeltaFunctionCall(arguments=arguments)
                )
            )


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that begins `mark`."""
    lengths: Iterable[int] = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)
