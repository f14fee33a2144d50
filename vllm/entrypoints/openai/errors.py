"""From exceptions to HTTP status codes and error objects.

Every handler raises; `api_server.py` and the stream writer turn what was raised into a response
here. No handler builds an error body of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.response import ErrorInfo, ErrorResponse
from vllm.errors import EngineDeadError, RequestError, VllmError
from vllm.logger import init_logger

logger = init_logger(__name__)

_BODY_FIELDS = {"prompt_token_ids": "prompt", "beam_width": "n"}
"""Fields of the Python API that have another name in bodies."""

_SAYS_ENOUGH = ("missing", "value_error")
"""Kinds of problems without a value of their own, or whose text, being ours, names it."""

_MAX_SHOWN = 60  # characters of a wrong value in a message


class ApiError(VllmError):
    """A request that is answered with an error of a given status.

    Attributes:
        status: HTTP status.
        kind: error type in 0.6.3's words, e.g. "NotFoundError".
        code: machine-readable code in OpenAI's words, e.g. "model_not_found", or None.
        param: name of the offending field, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        kind: str = "BadRequestError",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param


class ClientDisconnected(Exception):
    """The client went away; nobody reads the answer."""


def _openai_type(status: HTTPStatus) -> str:
    if status is HTTPStatus.UNAUTHORIZED:
        return "authentication_error"
    if status is HTTPStatus.NOT_FOUND:
        return "not_found_error"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"


def model_not_found(name: str, served: Sequence[str]) -> ApiError:
    """Return the error for a model name that is not served."""
    return ApiError(
        f"The model `{name}` does not exist; served here: {', '.join(served)}.",
        status=HTTPStatus.NOT_FOUND,
        kind="NotFoundError",
        code="model_not_found",
        param="model",
    )


def api_error(cause: BaseException) -> ApiError:
    """Return the error to answer with when `cause` ended a request.

    What the caller did wrong is told in full; of our own faults only the kind is told, the log
    has the rest.
    """
    if isinstance(cause, ApiError):
        return cause
    if isinstance(cause, RequestError):
        return ApiError(str(cause), param=_BODY_FIELDS.get(cause.param or "", cause.param))
    if isinstance(cause, EngineDeadError):
        return ApiError(
            str(cause),
            status=HTTPStatus.INTERNAL_SERVER_ERROR,
            kind="EngineDeadError",
            code="engine_dead",
        )
    if isinstance(cause, ValueError):
        return ApiError(str(cause))
    return ApiError(
        f"Internal error ({type(cause).__name__}); the server's log says more.",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        kind="InternalServerError",
    )


def error_body(error: ApiError) -> ErrorResponse:
    """Return the body that tells of an error."""
    message = str(error).encode(errors="replace").decode()  # it may quote what is no text
    return ErrorResponse(
        error=ErrorInfo(
            message=message,
            type=_openai_type(error.status),
            param=error.param,
            code=error.code,
        ),
        message=message,
        type=error.kind,
        param=error.param,
        code=int(error.status),
    )


def log_server_error(error: ApiError, cause: BaseException) -> None:
    """Log an error that is ours: with its traceback, unless it is one that we raise on purpose."""
    if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return
    logger.error("request failed: %s", cause, exc_info=not isinstance(cause, VllmError) and cause)


def validation_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error for a body that does not fit its schema.

    Args:
        problems: pydantic's list of errors.
    """
    lines = [_problem(problem) for problem in problems]
    param = lines[0][0] if lines else None
    return ApiError("; ".join(dict.fromkeys(text for _, text in lines)), param=param)


def _problem(problem: Mapping[str, Any]) -> tuple[str | None, str]:
    kind = problem["type"]
    text = str(problem["msg"]).removeprefix("Value error, ")
    if kind == "json_invalid":
        cause = problem.get("ctx", {}).get("error", "")
        return None, f"The body is not valid JSON: {cause} (at character {problem['loc'][-1]})"
    path = [str(part) for part in problem["loc"] if part != "body"]
    if not path and kind in ("missing", "model_attributes_type", "dict_type"):
        return None, "The body must be a JSON object, sent as Content-Type: application/json."
    if not path:
        field, colon, _ = text.partition(":")
        return (field if colon and field.isidentifier() else None), text
    if kind not in _SAYS_ENOUGH:  # of a number with a fraction pydantic says so, without the number
        text = f"{text.partition(', got ')[0]}, got {_show(problem.get('input'))}"
    return path[0], f"{'.'.join(path)}: {text}"


def _show(value: object) -> str:
    """Return what a client sent, as it wrote it; long values shortened."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def raise_if_dead(engine: EngineClient) -> None:
    """Raise the engine's own error if it has ended."""
    if engine.errored:
        raise engine.dead_error
