"""What the launcher checks before the model is there: plugins, middleware, TLS files, the port."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from vllm.entrypoints.launcher import bind_socket
from vllm.entrypoints.openai.http_server import check_tls
from vllm.entrypoints.openai.middleware import find_user_middleware
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.entrypoints.openai.server_state import find_tool_parser
from vllm.errors import ConfigError


@pytest.mark.parametrize("path", ["no.such.thing", "json.nothing", "json", "json.dumps", ""])
def test_middleware_that_is_none(path: str) -> None:
    with pytest.raises(ConfigError, match="--middleware"):
        find_user_middleware(path)


def test_tool_parser_that_does_not_exist(tmp_path: Path) -> None:
    auto = {"enable_auto_tool_choice": True}
    with pytest.raises(ConfigError, match="known: hermes, internlm"):
        find_tool_parser(ServerArgs(**auto, tool_call_parser="wrong"))
    with pytest.raises(ConfigError, match="no such Python file"):
        find_tool_parser(ServerArgs(tool_parser_plugin=str(tmp_path / "none.py")))
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        find_tool_parser(ServerArgs(tool_parser_plugin=str(broken)))
    assert find_tool_parser(ServerArgs()) is None
    assert find_tool_parser(ServerArgs(**auto, tool_call_parser="llama3_json")) is not None


def test_tls_files_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/no/cert"):
        check_tls(ServerArgs(ssl_certfile="/no/cert", ssl_keyfile="/no/key"))
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    with pytest.raises(ConfigError, match=r"empty\.pem"):
        check_tls(ServerArgs(ssl_certfile=str(empty)))


def test_port_is_exclusive_before_anybody_listens() -> None:
    with bind_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use"):
            bind_socket("127.0.0.1", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=2)


def test_port_whose_connections_wind_down_can_be_taken() -> None:
    with bind_socket("127.0.0.1", 0) as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        first.listen()
        address = first.getsockname()
        client = socket.create_connection(address)
        accepted, _ = first.accept()
        accepted.close()  # the side that closes first keeps the port in TIME_WAIT
        client.close()
    with bind_socket(*address), pytest.raises(ConfigError, match="already in use"):
        bind_socket(*address)


def test_host_is_honoured() -> None:
    with bind_socket("127.0.0.1", 0) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    with bind_socket(None, 0) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        bind_socket("192.0.2.1", 0)
