"""A small client of the server, for the terminal commands; standard library only, to start fast."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from vllm import envs
from vllm.errors import VllmError

DEFAULT_URL = "http://localhost:8000/v1"


class HttpError(VllmError):
    """The server cannot be reached, or answered with an error."""


class ApiClient:
    """Talks to one server; every call opens a connection of its own."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = 3600) -> None:
        """Make a client.

        Args:
            url: base of the OpenAI API, usually ending in /v1.
            api_key: bearer token; None takes OPENAI_API_KEY.
            timeout_s: longest wait for the next bytes.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HttpError(f"{url!r} is not an http or https URL")
        self._parts = parts
        self._base = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        key = api_key or envs.OPENAI_API_KEY or "EMPTY"
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    @property
    def root(self) -> str:
        """Path in front of /v1, where the endpoints beside the OpenAI API are."""
        return self._base.removesuffix("/v1")

    def get(self, path: str) -> Any:
        """Return the JSON body of a GET below the base."""
        return self._read(self._send("GET", self._base + path, None))

    def get_from_root(self, path: str) -> Any:
        """Return the JSON body of a GET beside the OpenAI API."""
        return self._read(self._send("GET", self.root + path, None))

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a POST that streams."""
        response = self._send("POST", self._base + path, {**body, "stream": True})
        with response:
            for line in response:
                text = line.decode().strip()
                if not text.startswith("data:"):
                    continue
                data = text.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise HttpError(_message(event))
                yield event

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        host, port = self._parts.hostname or "", self._parts.port
        connection: http.client.HTTPConnection
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                host, port, timeout=self._timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        payload = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, payload, self._headers)
            response = connection.getresponse()
        except OSError as cause:
            where = f"{self._parts.scheme}://{self._parts.netloc}"
            raise HttpError(f"no server answers at {where}: {cause}") from cause
        if response.status >= 400:
            with response:
                raise HttpError(f"{response.status} {_error_text(response.read())}")
        return response

    @staticmethod
    def _read(response: http.client.HTTPResponse) -> Any:
        with response:
            return json.loads(response.read())


def _error_text(body: bytes) -> str:
    try:
        return _message(json.loads(body))
    except ValueError:
        return body.decode(errors="replace")[:500]


def _message(body: dict[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message")) if isinstance(error, dict) else str(body)
