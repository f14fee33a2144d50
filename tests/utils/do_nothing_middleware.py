"""A user's function-style middleware that does nothing, for --middleware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response


async def do_nothing(
    request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Pass the request on."""
    return await call_next(request)
