"""The ASGI layers of the server: API key, request ids, and what users add with --middleware.

Our own are plain ASGI: they cost a function call and hide nothing. `api_server.py` puts them in
order.
"""

from __future__ import annotations

import hmac
import importlib
import inspect
import re
import uuid
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.openai.errors import ApiError, error_body
from vllm.entrypoints.openai.response import encode_json
from vllm.errors import ConfigError

_OPEN_PATHS = frozenset({"/health"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_REQUEST_ID_HEADER = b"x-request-id"
_REQUEST_ID_KEY = "vllm.request_id"


def error_response(error: ApiError) -> Response:
    """Return the response that tells of an error."""
    return Response(
        encode_json(error_body(error)), int(error.status), media_type="application/json"
    )


class ApiKeyCheck:
    """Asks for `Authorization: Bearer <key>` on every path but /health.

    Preflight requests (OPTIONS) pass, for browsers send them without credentials.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            "Unauthorized: the header `Authorization: Bearer <key>` is missing or wrong.",
            status=HTTPStatus.UNAUTHORIZED,
            kind="AuthenticationError",
            code="invalid_api_key",
        )
        response = error_response(error)
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            return True
        if scope["path"].removeprefix(scope.get("root_path", "")) in _OPEN_PATHS:
            return True
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        return hmac.compare_digest(given, self._wanted)


class RequestIds:
    """Takes the client's X-Request-Id, or makes one, and sends it back with the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request with its id in the scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == _REQUEST_ID_HEADER), b"")
        own, text = uuid.uuid4().hex, given.decode("latin-1")
        is_valid = _REQUEST_ID.fullmatch(text) is not None
        # Clients may send one id twice, at the same time even; inside, ids are unique.
        scope[_REQUEST_ID_KEY] = f"{text}-{own[:8]}" if is_valid else own
        header = (_REQUEST_ID_HEADER, given if is_valid else own.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self._app(scope, receive, send_with_id)


def get_request_id(scope: Scope) -> str:
    """Return the unique id of the request that is being served; it begins with the client's."""
    request_id: str = scope[_REQUEST_ID_KEY]
    return request_id


def find_user_middleware(path: str) -> Any:
    """Return the class or coroutine function that --middleware names.

    Raises:
        ConfigError: there is nothing of that name, or it is of another kind.
    """
    module_name, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as cause:
        raise ConfigError(f"--middleware {path!r}: cannot be imported: {cause}") from cause
    if not inspect.isclass(found) and not inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"--middleware {path!r}: expected a class or a coroutine function, "
            f"got {type(found).__name__}"
        )
    return found


def add_user_middleware(app: Starlette, path: str) -> None:
    """Add what --middleware names: a class is an ASGI layer, a coroutine function wraps HTTP."""
    found = find_user_middleware(path)
    if inspect.isclass(found):
        app.add_middleware(found)  # type: ignore[arg-type]
    else:
        app.add_middleware(BaseHTTPMiddleware, dispatch=found)
