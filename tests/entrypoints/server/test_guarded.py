"""Keys, browsers, proxies, request ids, disconnects and gauges, against real servers."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest

from tests.entrypoints.server.conftest import API_KEY
from tests.utils.chain_checkpoint import ENDLESS_TOKENS
from tests.utils.server_process import ServerProcess, read_json, wait_until

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "ABC"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_key_protects_everything_but_health(guarded: ServerProcess) -> None:
    with httpx.Client(base_url=guarded.url) as stranger:
        assert stranger.get("/health").status_code == 200
        assert stranger.get("/proxy/health").status_code == 200
        for path in (
            "/v1/models",
            "/version",
            "/metrics",
            "/stats",
            "/nowhere",
            "/proxy/v1/models",
        ):
            reply = stranger.get(path)
            assert reply.status_code == 401, path
            assert reply.json()["error"]["code"] == "invalid_api_key"
        for path in ("/tokenize", "/detokenize", "/v1/completions", CHAT, "/health/../v1/models"):
            assert stranger.post(path, json={}).status_code == 401, path
        for header in ("Bearer wrong", API_KEY, f"bearer {API_KEY}", f"Bearer {API_KEY}x"):
            reply = stranger.get("/v1/models", headers={"Authorization": header})
            assert reply.status_code == 401, header
    sdk = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        sdk.models.list()
    assert guarded.http.get("/v1/models").status_code == 200


def test_browsers(guarded: ServerProcess) -> None:
    preflight = {"Access-Control-Request-Method": "POST"}
    with httpx.Client(base_url=guarded.url) as browser:
        good = browser.options(CHAT, headers={"Origin": "https://good.example", **preflight})
        assert good.status_code == 200
        assert good.headers["access-control-allow-origin"] == "https://good.example"
        bad = browser.options(CHAT, headers={"Origin": "https://bad.example", **preflight})
        assert "access-control-allow-origin" not in bad.headers
        refused = browser.get("/v1/models", headers={"Origin": "https://good.example"})
        assert refused.status_code == 401
        assert "access-control-allow-origin" in refused.headers, "browsers could not read the error"


def test_root_path_and_docs(server: ServerProcess, guarded: ServerProcess) -> None:
    assert read_json(guarded.http.get("/proxy/v1/models"))["data"][0]["id"] == "model"
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert server.http.get(path).status_code == 200
        assert guarded.http.get(path).status_code == 404
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", CHAT, "/tokenize", "/stats", "/health"} <= set(paths)


def test_request_ids(server: ServerProcess) -> None:
    reply = server.http.get("/v1/models", headers={"X-Request-Id": "trace-1"})
    assert reply.headers["x-request-id"] == "trace-1"
    body = {"model": "model", "prompt": "ABC"}
    replies = [
        server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "same"})
        for _ in range(2)
    ]
    assert [r.headers["x-request-id"] for r in replies] == ["same", "same"]
    ids = [r.json()["id"] for r in replies]
    assert all(i.startswith("cmpl-same-") and i in server.log for i in ids)
    assert len(set(ids)) == 2
    odd = server.http.get("/health", headers={"X-Request-Id": "bad id!"})
    assert odd.headers["x-request-id"] != "bad id!"
    first, second = (server.post("/v1/completions", prompt="ABC").json()["id"] for _ in range(2))
    assert first != second
    assert len(first) == len("cmpl-") + 32


def test_same_request_id_at_the_same_time(server: ServerProcess) -> None:
    body = json.dumps({"model": "model", "prompt": "A", "max_tokens": 50})
    connections = [send_raw(server, body, extra="X-Request-Id: twin\r\n") for _ in range(2)]
    for connection in connections:
        reply = read_all(connection)
        assert reply.startswith(b"HTTP/1.1 200"), reply[:300]


def test_log_shows_requests_cut_to_length(server: ServerProcess) -> None:
    server.complete(prompt="B" * 100)
    wait_until(lambda: "'" + "B" * 20 + "'" in server.log, 2, "the log line of the request")
    assert "B" * 21 not in server.log


def test_other_endpoints(server: ServerProcess) -> None:
    assert set(read_json(server.http.get("/version"))) == {"version"}
    (card,) = read_json(server.http.get("/v1/models"))["data"]
    assert (card["id"], card["object"], card["owned_by"]) == ("model", "model", "vllm")
    assert card["max_model_len"] == ENDLESS_TOKENS
    assert read_json(server.http.get("/v1/models/model"))["id"] == "model"
    stats = server.stats()
    assert stats["scheduler_running"] is True
    assert stats["num_total_gpu_blocks"] > 0
    assert stats["kernels"]
    health = server.http.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    ids = server.post("/tokenize", prompt="ABCDEF").json()["tokens"]
    assert ids == [65, 66, 67, 257]
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": "ABCDEF"}


def test_metrics_move(server: ServerProcess) -> None:
    def read(name: str) -> float:
        return next(v for k, v in server.metrics().items() if k.startswith(f"vllm:{name}{{"))

    before = read("generation_tokens_total"), read("prompt_tokens_total")
    server.complete(prompt="ABC", temperature=0)
    assert read("generation_tokens_total") == before[0] + 6
    assert read("prompt_tokens_total") == before[1] + 3
    assert read("num_requests_running") == 0
    label = '{model_name="model"}'
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert server.metrics()[f"vllm:{name}_count{label}"] > 0
    assert server.http.get("/metrics/").status_code == 200


# C24: tool_choice none is ordinary content


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"},
        {"tool_choice": "none", "tools": TOOLS},
        {"tools": None, "tool_choice": None},
    ],
    ids=["no tools", "a tool", "nulls"],
)
def test_c24_tool_choice_none(
    server: ServerProcess, guarded: ServerProcess, fields: dict[str, Any]
) -> None:
    for each in (server, guarded):
        (choice,) = each.chat("ABC", temperature=0, **fields)["choices"]
        assert choice["finish_reason"] in ("stop", "length")
        assert choice["message"]["content"] == "DEFGHIJK"
        assert choice["message"]["tool_calls"] == []


# C47 and C49: gauges describe now, and disconnects are seen behind every guard


def send_raw(
    server: ServerProcess, body: str, path: str = "/v1/completions", extra: str = ""
) -> Any:
    """Send a request over a raw socket."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Authorization: Bearer {API_KEY}\r\nContent-Type: application/json\r\n"
        f"{extra}Content-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall((head + body).encode())
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    connection.close()
    return data


def is_idle(server: ServerProcess) -> bool:
    """Whether nothing runs and every block is free."""
    stats = server.stats()
    return (
        stats["num_running_requests"] == stats["num_waiting_requests"] == 0
        and stats["num_free_gpu_blocks"] == stats["num_total_gpu_blocks"]
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["server", "guarded"])
def test_c49_disconnect(request: pytest.FixtureRequest, name: str, stream: bool) -> None:
    server: ServerProcess = request.getfixturevalue(name)
    limits = {"max_tokens": ENDLESS_TOKENS - 100, "ignore_eos": True, "stream": stream}
    bodies = [
        ("/v1/completions", {"model": "model", "prompt": "A", **limits}),
        (CHAT, {"model": "model", "messages": [{"role": "user", "content": "A"}], **limits}),
    ]
    connections = [send_raw(server, json.dumps(body), path) for path, body in bodies]
    wait_until(lambda: server.stats()["num_running_requests"] == 2, 10, "both requests run")
    for connection in connections:
        connection.close()
    wait_until(lambda: is_idle(server), 2, "abandoned requests are aborted")


def test_c47_gauges_after_a_mass_abort(server: ServerProcess) -> None:
    body = {
        "model": "model",
        "prompt": "A",
        "max_tokens": ENDLESS_TOKENS - 100,
        "ignore_eos": True,
        "stream": True,
    }
    connections = [send_raw(server, json.dumps(body)) for _ in range(4)]
    wait_until(lambda: server.stats()["num_running_requests"] == 4, 10, "all requests run")
    for connection in connections:
        connection.close()
    label = '{model_name="model"}'

    def are_zero() -> bool:
        metrics = server.metrics()
        names = ("num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc")
        return all(metrics[f"vllm:{name}{label}"] == 0 for name in names)

    wait_until(are_zero, 2, "gauges are zero after the abort")
    total = f"vllm:generation_tokens_total{label}"
    before = server.metrics()[total]
    server.complete(prompt="ABC", temperature=0)
    assert server.metrics()[total] == before + 6
    assert server.metrics()[
        'vllm:request_success_total{finished_reason="abort",model_name="model"}'
    ]
