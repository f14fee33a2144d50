"""FX-CHAIN, and a server around an engine that writes what a test tells it to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.utils.chain_checkpoint import build_cases_checkpoint
from tests.utils.fixtures_models import build_chain_tokenizer
from tests.utils.http_server import serve_engine
from tests.utils.scripted_engine import ScriptedEngine
from tests.utils.server_process import read_events, read_json

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}tools {{ tools | length }}\n{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def chain_tokenizer() -> Any:
    """The tokenizer of FX-CHAIN with a plain chat template."""
    return build_chain_tokenizer(CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def chain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The FX-CHAIN checkpoint of the HTTP cases."""
    return build_cases_checkpoint(tmp_path_factory.mktemp("chain"))


class Client:
    """A scripted engine behind a real server."""

    def __init__(self, engine: ScriptedEngine, url: str) -> None:
        self.engine = engine
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=20)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST a JSON body; the model is filled in."""
        return self.http.post(path, json={"model": "chain", **body})

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
        assert reply.headers["content-type"].startswith("text/event-stream")
        return read_events(reply.text)


@pytest.fixture(scope="session")
def hello(chain_tokenizer: Any) -> Iterator[Client]:
    """A server, shared by all tests, that answers "hello" to everything."""
    engine = ScriptedEngine(chain_tokenizer, "hello")
    with serve_engine(engine) as url:
        client = Client(engine, url)
        yield client
        client.http.close()


@pytest.fixture
def serve(chain_tokenizer: Any) -> Iterator[Any]:
    """A function that serves a scripted engine: serve(answer, engine options…, flags={…})."""
    running = []

    def start(
        answer: Any = "hello", *, flags: dict[str, Any] | None = None, **options: Any
    ) -> Client:
        engine = ScriptedEngine(chain_tokenizer, answer, **options)
        context = serve_engine(engine, **(flags or {}))
        client = Client(engine, context.__enter__())
        running.append((client, context))
        return client

    yield start
    for client, context in running:
        client.http.close()
        context.__exit__(None, None, None)
