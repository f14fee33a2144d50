"""The HTTP routes. No logic: each hands its body to a serving class and sends what comes back.

`launcher.py` builds the app once the engine runs; `python -m vllm.entrypoints.openai.api_server`
starts it all, as `vllm serve` does.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from vllm.entrypoints.openai.chat_request import ChatCompletionRequest
from vllm.entrypoints.openai.client_connection import ClientConnection, run_while_connected
from vllm.entrypoints.openai.completion_request import CompletionRequest
from vllm.entrypoints.openai.errors import (
    ApiError,
    ClientDisconnected,
    api_error,
    log_server_error,
    validation_error,
)
from vllm.entrypoints.openai.event_stream import EventStream
from vllm.entrypoints.openai.middleware import (
    ApiKeyCheck,
    RequestIds,
    add_user_middleware,
    error_response,
    get_request_id,
)
from vllm.entrypoints.openai.response import encode_json
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.entrypoints.openai.server_state import ServerState
from vllm.entrypoints.openai.tokenize_request import DetokenizeRequest, TokenizeRequest
from vllm.version import __version__

_CLIENT_GONE = 499

router = APIRouter()


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def _respond(request: Request, work: Coroutine[Any, Any, Any]) -> Response:
    """Run a handler while the client is there, and send what it returns or raises."""
    try:
        result = await run_while_connected(request.scope, work)
    except ClientDisconnected:
        return Response(status_code=_CLIENT_GONE)
    except Exception as cause:
        error = api_error(cause)
        log_server_error(error, cause)
        return error_response(error)
    if result is None:
        return Response()
    if isinstance(result, EventStream):
        return result
    return Response(encode_json(result), media_type="application/json")


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine runs, 500 once it has ended."""
    return await _respond(request, _state(request).engine.check_health())


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of the server."""
    return {"version": __version__}


@router.get("/stats")
async def show_stats(request: Request) -> Response:
    """One snapshot of requests, blocks and kernels, describing now."""
    return await _respond(request, _state(request).engine.stats())


@router.get("/metrics", response_class=Response)
@router.get("/metrics/{rest:path}", include_in_schema=False)
async def show_metrics() -> Response:
    """Prometheus metrics, as text."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def show_available_models(request: Request) -> Response:
    """The names that are served."""
    return Response(
        encode_json(_state(request).tokens.list_models()), media_type="application/json"
    )


@router.get("/v1/models/{name:path}")
async def show_model(name: str, request: Request) -> Response:
    """One name."""

    async def find() -> msgspec.Struct:
        return _state(request).tokens.find_model(name)

    return await _respond(request, find())


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Complete a text."""
    work = _state(request).completion.create_completion(body, get_request_id(request.scope))
    return await _respond(request, work)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    work = _state(request).chat.create_chat_completion(body, get_request_id(request.scope))
    return await _respond(request, work)


@router.post("/v1/embeddings")
async def create_embedding() -> Response:
    """Refuse: the models that are served generate text."""
    return error_response(
        ApiError("Embedding API disabled: the model that is served generates text.", param="model")
    )


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Turn a text or a conversation into token ids."""
    return await _respond(request, _state(request).tokens.create_tokenize(body))


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Turn token ids into text."""
    return await _respond(request, _state(request).tokens.create_detokenize(body))


async def _answer_validation_error(request: Request, cause: Exception) -> Response:
    assert isinstance(cause, RequestValidationError), "registered for this kind only"
    return error_response(validation_error(cause.errors()))


async def _answer_http_exception(request: Request, cause: Exception) -> Response:
    assert isinstance(cause, HTTPException), "registered for this kind only"
    status = HTTPStatus(cause.status_code)
    kind = "NotFoundError" if status is HTTPStatus.NOT_FOUND else "BadRequestError"
    message = f"{cause.detail}: {request.method} {request.url.path}"
    if cause.__cause__ is not None and status is HTTPStatus.BAD_REQUEST:
        message = f"The body cannot be read as JSON: {cause.__cause__}"
    response = error_response(ApiError(message, status=status, kind=kind))
    response.headers.update(cause.headers or {})
    return response


def build_app(state: ServerState, args: ServerArgs) -> FastAPI:
    """Return the application.

    The layer that is added last is the outermost: the watch on the connection, request ids, the
    user's middleware in reverse order, CORS, the API key.

    Raises:
        ConfigError: --middleware names nothing that can be used.
    """
    docs = {"openapi_url": None, "docs_url": None, "redoc_url": None}
    app = FastAPI(
        title="vllm-hybrid",
        version=__version__,
        root_path=args.root_path or "",
        **(docs if args.disable_fastapi_docs else {}),  # type: ignore[arg-type]
    )
    app.state.server = state
    app.include_router(router)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    if args.api_key:
        app.add_middleware(ApiKeyCheck, api_key=args.api_key)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_credentials=args.allow_credentials,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
    )
    for path in args.middleware:
        add_user_middleware(app, path)
    app.add_middleware(RequestIds)
    app.add_middleware(ClientConnection)
    return app


if __name__ == "__main__":
    from vllm.entrypoints.cli.serve import serve_module

    sys.exit(serve_module())
