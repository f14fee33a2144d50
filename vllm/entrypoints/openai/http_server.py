"""The uvicorn server: its configuration, and an end that the launcher decides about."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from socket import SO_REUSEADDR, SOL_SOCKET, socket

import uvicorn
from starlette.types import ASGIApp

from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.utils.heap import freeze_heap

logger = init_logger(__name__)

_KEEP_ALIVE_S = 5


class HttpServer(uvicorn.Server):
    """A server that leaves signals to the launcher and says where it listens."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take no signals: the launcher has them from the start on."""
        yield

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Begin to listen, then say so."""
        for sock in sockets or ():  # connections inherit it: the next server can take the port
            sock.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        freeze_heap()
        await super().startup(sockets)
        for sock in sockets or ():
            host, port = sock.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            scheme = "https" if self.config.is_ssl else "http"
            logger.info("Ready: serving at %s://%s:%d", scheme, shown, port)

    def stop(self) -> None:
        """Take no new requests, let running ones finish, then end."""
        logger.info(
            "Stopping: running requests may take up to %s s more; a second signal ends them now",
            self.config.timeout_graceful_shutdown,
        )
        self.should_exit = True

    def stop_now(self) -> None:
        """End without waiting for running requests."""
        logger.warning("Stopping now; running requests are cut")
        self.should_exit = True
        self.force_exit = True


def check_tls(args: ServerArgs) -> None:
    """Raise ConfigError if the TLS files do not exist or do not fit together."""
    if args.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        if args.ssl_ca_certs:
            context.load_verify_locations(args.ssl_ca_certs)
    except (OSError, ssl.SSLError) as cause:
        files = ", ".join(filter(None, (args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)))
        raise ConfigError(f"TLS cannot be set up from {files}: {cause}") from cause


def make_http_server(app: ASGIApp, args: ServerArgs) -> HttpServer:
    """Configure the server."""
    config = uvicorn.Config(
        app,
        loop="none",  # the launcher has made the event loop
        http="httptools",
        ws="none",
        lifespan="off",
        log_level=args.uvicorn_log_level,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(args.shutdown_timeout)),
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
    )
    return HttpServer(config)
