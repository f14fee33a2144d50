"""A real HTTP server in a thread, around an application that a test has built.

Requests travel through sockets and uvicorn, so disconnects, keep-alive and streaming are the real
ones; the engine lives in this process and can be looked into.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.entrypoints.openai.server_state import make_server_state


class _ThreadServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def serve_engine(engine: Any, **flags: Any) -> Iterator[str]:
    """Serve `engine` with the given ServerArgs; yields the base URL without a path."""
    args = ServerArgs(**flags)
    state = asyncio.run(make_server_state(engine, args, logs_requests=False))
    config = uvicorn.Config(
        build_app(state, args), host="127.0.0.1", port=0, log_level="warning", lifespan="off"
    )
    server = _ThreadServer(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server could not start"
        threading.Event().wait(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"
