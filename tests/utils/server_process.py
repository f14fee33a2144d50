"""A real server: `vllm serve` in processes of its own, on a free port.

`ServerProcess` is a context manager; on leaving it the server is told to end, and whatever it has
started must end with it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

START_S = 90.0
STOP_S = 20.0


def find_free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> float:
    """Wait for a condition; returns the seconds it took."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() < start_s + timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - start_s


class ServerProcess:
    """A server of one model under the name "model".

    Attributes:
        url: base without a path.
        http: a client with the key, if any.
        log_path: where its output goes.
    """

    def __init__(
        self,
        model: str | Path,
        *flags: str,
        env: Mapping[str, str] | None = None,
        api_key: str | None = None,
        verify: str | None = None,
    ) -> None:
        """Describe a server.

        Args:
            model: what to serve.
            flags: further flags.
            env: further environment variables.
            api_key: the key that clients send and the server asks for.
            verify: certificate of a TLS server.
        """
        self.port = find_free_port()
        self.url = f"{'https' if verify else 'http'}://localhost:{self.port}"
        self._command = [
            sys.executable, "-m", "vllm.scripts", "serve", str(model), "--host", "127.0.0.1",
            "--port", str(self.port), "--served-model-name", "model", *flags,
        ]  # fmt: skip
        if api_key:
            self._command += ["--api-key", api_key]
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._env = {**os.environ, "PYTHONPATH": path, **(env or {})}
        self.log_path = Path(tempfile.mkstemp(prefix="vllm-test-", suffix=".log")[1])
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.Client(
            base_url=self.url, headers=headers, timeout=60, verify=verify or True
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._children: list[psutil.Process] = []

    def __enter__(self) -> ServerProcess:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        try:
            self.stop()
        finally:
            self._kill_all()
            self.log_path.unlink(missing_ok=True)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The server's first process."""
        assert self._process is not None, "start comes first"
        return self._process

    @property
    def log(self) -> str:
        """What the server has written so far."""
        return self.log_path.read_text(errors="replace")

    def start(self) -> None:
        """Start it and return at once."""
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_ready(self) -> float:
        """Wait until /health answers; returns the seconds."""
        start_s = time.monotonic()
        while True:
            assert self.process.poll() is None, f"the server ended:\n{self.log[-4000:]}"
            assert time.monotonic() < start_s + START_S, f"not ready:\n{self.log[-4000:]}"
            try:
                if self.http.get("/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        self._children = self.children()
        return time.monotonic() - start_s

    def children(self) -> list[psutil.Process]:
        """All processes that the server has started."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> int:
        """Send SIGTERM and wait; returns the exit status, after which no process may be left."""
        if self.process.poll() is None:
            self._children = self.children() or self._children
            self.process.terminate()
        status = self.process.wait(STOP_S)
        self.assert_no_orphans()
        return status

    def assert_no_orphans(self) -> None:
        """Fail if a process that the server had started still lives some seconds after it."""
        gone, alive = psutil.wait_procs(self._children, timeout=5)
        assert not alive, f"left behind: {alive}, gone: {gone}"

    def _kill_all(self) -> None:
        for process in [*self._children, *self.children()]:
            if process.is_running():
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST a JSON body; the model is filled in."""
        return self.http.post(path, json={"model": "model", **body})

    def complete(self, **body: Any) -> dict[str, Any]:
        """Return the body of a text completion that must succeed."""
        return read_json(self.post("/v1/completions", **body))

    def chat(self, content: str = "hi", **body: Any) -> dict[str, Any]:
        """Return the body of a chat completion that must succeed."""
        messages = [{"role": "user", "content": content}]
        return read_json(self.post("/v1/chat/completions", **{"messages": messages, **body}))

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a stream that must end with [DONE]."""
        reply = self.post(path, stream=True, **body)
        assert reply.status_code == 200, reply.text
        return read_events(reply.text)

    def stats(self) -> dict[str, Any]:
        """Return the body of /stats."""
        return read_json(self.http.get("/stats"))

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics by name, labels included."""
        reply = self.http.get("/metrics")
        assert reply.status_code == 200
        lines = [line for line in reply.text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (ln.rpartition(" ") for ln in lines)}


def read_json(reply: httpx.Response) -> Any:
    """Parse the body of a successful reply, strictly."""
    assert reply.status_code == 200, reply.text
    return json.loads(reply.text, parse_constant=_refuse)


def read_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a whole stream, without the final [DONE]."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]", events[-3:]
    return [json.loads(event, parse_constant=_refuse) for event in events[:-1]]


def _refuse(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")
