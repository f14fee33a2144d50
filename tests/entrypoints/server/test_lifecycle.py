"""Start, end and failure of whole servers: signals, killed processes, bad flags, taken ports."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.utils.chain_checkpoint import ENDLESS_TOKENS
from tests.utils.server_process import ServerProcess, find_free_port, wait_until

LONG = {"prompt": "A", "max_tokens": ENDLESS_TOKENS - 1, "ignore_eos": True}


class Reader(threading.Thread):
    """Reads one stream in the background."""

    def __init__(self, server: ServerProcess, **body: Any) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self.error: Exception | None = None
        self._url = f"{server.url}/v1/completions"
        self._body = {"model": "model", "stream": True, **body}
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as reply:
                self.lines += [line for line in reply.iter_lines() if line]
        except httpx.TransportError as cause:
            self.error = cause


def wait_running(server: ServerProcess, count: int = 1) -> None:
    """Wait until so many requests run."""
    wait_until(lambda: server.stats()["num_running_requests"] == count, 20, f"{count} running")


@pytest.fixture
def start(chain_model: Path) -> Iterator[Any]:
    """A function that makes a server of the chain model which is surely ended."""
    servers: list[ServerProcess] = []

    def make(
        *flags: str, ready: bool = True, model: Any = chain_model, **options: Any
    ) -> ServerProcess:
        server = ServerProcess(model, *flags, **options)
        servers.append(server)
        server.start()
        if ready:
            server.wait_ready()
        return server

    yield make
    for server in servers:
        server.__exit__()


def test_sigterm_lets_running_requests_finish(start: Any) -> None:
    server = start()
    readers = [Reader(server, **{**LONG, "max_tokens": 100}) for _ in range(2)]
    wait_running(server, 2)
    server.process.send_signal(signal.SIGTERM)
    for child in server.children():  # as service managers do
        child.send_signal(signal.SIGTERM)
    for reader in readers:
        reader.join(40)
        assert reader.error is None
        assert reader.lines[-1] == "data: [DONE]"
        assert len(reader.lines) == 101
    assert server.process.wait(20) == 0
    server.assert_no_orphans()
    with pytest.raises(httpx.ConnectError):
        server.http.get("/health")


def test_second_signal_does_not_wait(start: Any) -> None:
    server = start()
    reader = Reader(server, **LONG)
    wait_running(server)
    server.process.send_signal(signal.SIGINT)
    wait_until(lambda: "Stopping:" in server.log, 5, "the first signal is seen")
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(10) == 0
    server.assert_no_orphans()
    reader.join(10)
    assert "data: [DONE]" not in reader.lines


def test_waiting_for_running_requests_is_bounded(start: Any) -> None:
    server = start("--shutdown-timeout", "1", "--disable-frontend-multiprocessing")
    reader = Reader(server, **LONG)
    wait_running(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    reader.join(5)
    assert not reader.is_alive()


def test_killed_engine(start: Any) -> None:
    server = start()
    reader = Reader(server, **LONG)
    wait_running(server)
    (engine,) = server.children()
    engine.kill()
    wait_until(lambda: server.http.get("/health").status_code == 500, 3, "/health says so")
    reply = server.post("/v1/completions", prompt="A")
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "engine_dead"
    reader.join(5)
    assert reader.error is None
    assert "SIGKILL" in json.loads(reader.lines[-2].removeprefix("data: "))["error"]["message"]
    assert server.process.wait(10) == 1
    server.assert_no_orphans()


def test_killed_engine_may_leave_the_server_up(start: Any) -> None:
    server = start(env={"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"})
    server.children()[0].kill()
    wait_until(lambda: server.http.get("/health").status_code == 500, 3, "/health says so")
    time.sleep(3)
    assert server.http.get("/health").status_code == 500
    assert server.stop() == 1


def test_killed_server_takes_its_engine_along(start: Any) -> None:
    server = start()
    server.process.kill()
    server.process.wait(5)
    server.assert_no_orphans()


def test_signal_while_loading(start: Any) -> None:
    server = start(ready=False)
    wait_until(server.children, 20, "the engine process is there")
    time.sleep(0.3)
    server._children = server.children()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) != 0
    server.assert_no_orphans()


def last_line(server: ServerProcess) -> str:
    """Wait for the end of a server that cannot start; returns the last line that it wrote."""
    assert server.process.wait(60) != 0
    return server.log.strip().splitlines()[-1]


def test_taken_port_is_said_at_once(start: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start("--port", str(port), ready=False)
        assert f"127.0.0.1:{port}: Address already in use" in last_line(server)
    assert "Traceback" not in server.log
    assert "Loading" not in server.log


def test_model_that_cannot_be_loaded(start: Any, tmp_path: Path) -> None:
    missing = start(ready=False, model=tmp_path / "nothing")
    line = last_line(missing)
    assert line.startswith("vllm serve: error:")
    assert "nothing" in line
    missing.assert_no_orphans()


def test_broken_weights(start: Any, chain_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in chain_model.iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(
            data[: len(data) // 2] if "safetensors" in file.name else data
        )
    server = start(ready=False, model=broken)
    assert last_line(server).startswith("vllm serve: error:")
    server.assert_no_orphans()


def test_yaml_config(start: Any, tmp_path: Path, chain_model: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(
        "max_model_len: 100\n"
        "disable-log-requests: true\n"
        "enable-prefix-caching: false\n"
        "served_model_name: [model, other]\n"
        "middleware: [tests.utils.do_nothing_middleware.do_nothing]\n"
        "api-key: from-file\n"
    )
    server = start("--config", str(config), "--api_key=from-flag", "--max_num_seqs", "3")
    reply = server.http.get("/v1/models", headers={"Authorization": "Bearer from-flag"})
    assert [card["max_model_len"] for card in reply.json()["data"]] == [100]
    assert server.http.get("/v1/models").status_code == 401


def test_module_entry_point_and_tls(chain_model: Path, start: Any, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 "
        "-subj /CN=localhost -addext subjectAltName=DNS:localhost 2>/dev/null"
    )
    if os.system(command) != 0:
        pytest.skip("no openssl to make a certificate with")
    server = ServerProcess(
        chain_model, "--ssl-keyfile", str(key), "--ssl-certfile", str(cert), verify=str(cert)
    )
    position = server._command.index("vllm.scripts")
    server._command[position : position + 3] = [
        "vllm.entrypoints.openai.api_server", "--model", str(chain_model),
    ]  # fmt: skip
    with server:
        assert server.url.startswith("https")
        assert server.complete(prompt="ABC", temperature=0)["choices"][0]["text"] == "DEFGHIJK"
        assert "https://127.0.0.1" in server.log


def test_port_zero_and_two_servers_on_one_port(start: Any) -> None:
    port = find_free_port()
    first = start("--port", str(port), ready=False)
    wait_until(first.children, 20, "the first server has taken the port")
    second = start("--port", str(port), ready=False)
    assert "Address already in use" in last_line(second)
