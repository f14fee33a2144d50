"""Renders the chat templates that come with requests, in a process of their own.

Such a template is a program of whoever sent it. Jinja's sandbox keeps it from files and objects,
but not from using time and memory, which in the server's process would be everybody's: a power of
a power computes for hours and lets no other thread run. Here the kernel ends the process after
some seconds, and the next template gets a new one.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.entrypoints.openai.chat_template import render_chat_template
from vllm.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LIMIT_S = 5.0
"""Seconds that one template may take; real ones take milliseconds."""

_LIMIT_BYTES = 2 << 30
"""Memory of templates, beside what the process has mapped when it starts: the threads of a library,
one a processor, have stacks."""

_LIMIT_CHARACTERS = 1 << 24
"""Longest text that is taken back: it is the server's memory and time again."""

_CODE = (
    "import sys; sys.path[:] = {path!r}\n"
    "from vllm.entrypoints.openai.template_process import serve_templates\n"
    "serve_templates({socket_fd})"
)


class TemplateJob(msgspec.Struct, frozen=True, kw_only=True):
    """One template and what it is given; see `render_chat_template`.

    Attributes:
        special_tokens: the tokenizer's, which templates know as variables.
        limit_s: seconds that it may take.
    """

    special_tokens: dict[str, str]
    messages: Sequence[dict[str, Any]]
    chat_template: str
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, str]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any] | None
    limit_s: float = _LIMIT_S

    def encode(self) -> bytes:
        """Return the job as JSON, whose numbers may be of any size."""
        return json.dumps(msgspec.structs.asdict(self)).encode()

    @classmethod
    def decode(cls, frame: bytes) -> TemplateJob:
        """Return what was encoded."""
        return cls(**json.loads(frame))


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The text, or what was wrong.

    Attributes:
        is_last: whether the process ends now: compiled templates are kept and may fill its memory.
    """

    text: str = ""
    error: str | None = None
    param: str | None = None
    is_last: bool = False


class TemplateProcess:
    """A process that renders one template after another; started by the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        # One thread talks to it, so that requests queue up and cannot read each other's answers.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="templates")

    async def render(self, job: TemplateJob) -> str:
        """Return the text of a prompt.

        Raises:
            RequestError: what `render_chat_template` raises, or the template took too long or too
                much memory.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._ask, job)

    def _ask(self, job: TemplateJob) -> str:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        connection = self._connection or self._start()
        try:
            connection.send_bytes(job.encode())
            frame = connection.recv_bytes()
        except (EOFError, OSError):
            raise RequestError(_describe_end(self._end(), job.limit_s), "chat_template") from None
        answer = msgspec.json.decode(frame, type=_Answer)
        if answer.is_last:
            self._end()
        if answer.error is not None:
            raise RequestError(answer.error, answer.param)
        return answer.text

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            code = _CODE.format(path=sys.path, socket_fd=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        return self._connection

    def _end(self) -> int:
        """Let go of a process that has ended or is about to, and return its status."""
        assert self._process is not None and self._connection is not None, "it was started"
        self._connection.close()
        status = self._process.wait()
        self._process = self._connection = None
        return status


def _describe_end(status: int, limit_s: float) -> str:
    if status == -signal.SIGALRM:
        return f"chat template: it took more than {limit_s:g} s"
    return (
        f"chat template: the process that rendered it ended (status {status}); a template may use "
        f"{_LIMIT_BYTES >> 30} GiB"
    )


def serve_templates(socket_fd: int) -> None:
    """Render what comes in until the other end closes or memory ends; runs in the process."""
    from transformers.tokenization_utils_base import (  # noqa: PLC0415  seconds, and only here
        PreTrainedTokenizerBase,
    )

    most_bytes = _count_mapped_bytes() + _LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel's: no Python code needs to run
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    connection = Connection(socket_fd)
    is_last = False
    while not is_last:
        try:
            job = TemplateJob.decode(connection.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, job.limit_s)
        try:
            answer = _Answer(text=_render(PreTrainedTokenizerBase(**job.special_tokens), job))
        except RequestError as cause:
            is_last = isinstance(cause.__cause__, MemoryError)
            answer = _Answer(error=str(cause), param=cause.param, is_last=is_last)
        frame = msgspec.json.encode(answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(frame)


def _count_mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _render(tokenizer: PreTrainedTokenizerBase, job: TemplateJob) -> str:
    text = render_chat_template(
        tokenizer,
        job.messages,
        chat_template=job.chat_template,
        tools=job.tools,
        documents=job.documents,
        add_generation_prompt=job.add_generation_prompt,
        continue_final_message=job.continue_final_message,
        template_kwargs=job.template_kwargs,
    )
    if len(text) > _LIMIT_CHARACTERS:
        raise RequestError(
            f"chat template: it made {len(text)} characters of the messages; at most "
            f"{_LIMIT_CHARACTERS} are taken",
            "chat_template",
        )
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise RequestError(
            f"chat template: its text cannot be sent: {cause}", "chat_template"
        ) from cause
    return text
