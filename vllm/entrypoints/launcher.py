"""Starts the engine and the HTTP server, and ends both in order.

Called by `vllm serve`. The port is taken before anything is loaded; the engine starts in its own
process while this one imports the web framework. SIGTERM and Ctrl-C let running requests finish, a
second one does not wait. Whatever happens, no engine process stays behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from vllm import envs
from vllm.config import EngineConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.client import ProcessCore
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.errors import ConfigError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.engine.async_llm_engine import AsyncLLMEngine
    from vllm.engine.core_client import CoreClient
    from vllm.engine.protocol import EngineClient
    from vllm.entrypoints.openai.http_server import HttpServer

logger = init_logger(__name__)

_ABANDON_S = 5.0
_WATCH_S = 0.25
_TELL_S = 2.0
"""How long a server whose engine has ended goes on, to say so to clients and to health checks."""


def launch_server(engine_args: AsyncEngineArgs, server_args: ServerArgs) -> int:
    """Serve until told to stop; returns the exit status.

    Raises:
        VllmError: the server cannot start, with the reason.
    """
    sock = bind_socket(server_args.host, server_args.port)
    try:
        config = engine_args.create_engine_config()
        core = _make_core(config, server_args)
        with ThreadPoolExecutor(1, thread_name_prefix="engine-start") as pool:
            starting = pool.submit(
                _start_engine, config, core, logs_requests=not engine_args.disable_log_requests
            )
            try:
                import uvloop  # noqa: PLC0415  imported while the engine loads

                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    return runner.run(_Launch(starting, server_args, sock).run())
            finally:
                _end_engine(starting, core)
    finally:
        sock.close()


def bind_socket(host: str | None, port: int) -> socket.socket:
    """Take the port, without listening yet: clients are refused until the model is loaded.

    Raises:
        ConfigError: the address does not exist, or the port is taken.
    """
    shown = host or "0.0.0.0"
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            shown, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind)
    except OSError as cause:
        raise ConfigError(f"cannot listen on {shown}:{port}: {cause.strerror}") from cause
    # Two sockets that both allow reuse share a port until one listens. So this one allows it only
    # where connections of an earlier server still wind down, and not after that until it listens.
    try:
        try:
            sock.bind(address)
        except OSError:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as cause:
        sock.close()
        raise ConfigError(f"cannot listen on {shown}:{port}: {cause.strerror}") from cause
    return sock


def _make_core(config: EngineConfig, server_args: ServerArgs) -> CoreClient:
    if not server_args.disable_frontend_multiprocessing:
        return ProcessCore(config)
    from vllm.engine.core_client import ThreadCore  # noqa: PLC0415  brings the engine side in

    return ThreadCore(config)


def _start_engine(config: EngineConfig, core: CoreClient, *, logs_requests: bool) -> AsyncLLMEngine:
    """Start the engine and wait until it is ready; runs in a thread."""
    from vllm.engine.async_llm_engine import AsyncLLMEngine  # noqa: PLC0415  slow to import

    return AsyncLLMEngine(config, core, log_requests=logs_requests)


def _end_engine(starting: Future[AsyncLLMEngine], core: CoreClient) -> None:
    """End the engine, also one that still loads and cannot hear yet."""
    if not starting.done() and isinstance(core, ProcessCore) and core.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(core.pid, signal.SIGKILL)
        wait([starting], timeout=_ABANDON_S)
    core.shutdown()


class _Launch:
    """One server from its start to its end, on its event loop."""

    def __init__(
        self,
        starting: Future[AsyncLLMEngine],
        args: ServerArgs,
        sock: socket.socket,
    ) -> None:
        self._starting = starting
        self._args = args
        self._sock = sock
        self._server: HttpServer | None = None
        self._signals: list[int] = []
        self._is_told = asyncio.Event()

    async def run(self) -> int:
        """Serve; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._receive_signal, number)
        from vllm.entrypoints.openai import (  # noqa: PLC0415  imported while the engine loads
            api_server,
            http_server,
            middleware,
            server_state,
        )

        server_state.find_tool_parser(self._args)  # what is wrong is said before the model is there
        http_server.check_tls(self._args)
        for path in self._args.middleware:
            middleware.find_user_middleware(path)
        engine = await self._wait_for_engine()
        if engine is None:
            logger.info("Told to stop before the model was loaded")
            return 128 + self._signals[0]
        state = await server_state.make_server_state(
            engine, self._args, logs_requests=engine.log_requests
        )
        self._server = http_server.make_http_server(
            api_server.build_app(state, self._args), self._args
        )
        watch = asyncio.create_task(_watch_engine(engine, self._server))
        await self._server.serve(sockets=[self._sock])
        watch.cancel()
        return 1 if engine.errored else 0

    async def _wait_for_engine(self) -> AsyncLLMEngine | None:
        """Return the engine, or None if a signal came first."""
        ready = asyncio.wrap_future(self._starting)
        told = asyncio.create_task(self._is_told.wait())
        await asyncio.wait((ready, told), return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if self._signals:
            return None
        return await ready

    def _receive_signal(self, number: int) -> None:
        self._signals.append(number)
        self._is_told.set()
        if self._server is None:
            return
        if len(self._signals) == 1:
            self._server.stop()
        else:
            self._server.stop_now()


async def _watch_engine(engine: EngineClient, server: HttpServer) -> None:
    """End the server some moments after its engine has ended, unless it is to stay."""
    while not engine.errored:
        await asyncio.sleep(_WATCH_S)
    if envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH:
        logger.error("The engine has ended; the server stays, every request gets an error")
        return
    logger.error("The engine has ended; the server ends in %.0f s", _TELL_S)
    await asyncio.sleep(_TELL_S)
    server.should_exit = True
