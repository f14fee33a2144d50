"""The flags of the HTTP server; those of the engine are in `vllm.engine.arg_utils`."""

from __future__ import annotations

import argparse
import json
import math
import ssl
from dataclasses import dataclass, field, fields

from vllm import envs
from vllm.entrypoints.openai.chat_template import load_chat_template
from vllm.errors import ConfigError
from vllm.utils.argument_parser import FlexibleArgumentParser, StoreBoolean

_REFUSED = ("lora-modules", "prompt-adapters")
UVICORN_LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "trace")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """What the operator chose for the HTTP server.

    Attributes:
        api_key: token that every path but /health asks for; the environment's VLLM_API_KEY wins.
        chat_template: text of the template, already read.
        shutdown_timeout: seconds that running requests get to finish after SIGTERM or SIGINT.
        max_log_len: most prompt characters and ids in a request's log line; None for all.
    """

    host: str | None = None
    port: int = 8000
    uvicorn_log_level: str = "info"
    allow_credentials: bool = False
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    api_key: str | None = None
    chat_template: str | None = None
    response_role: str = "assistant"
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = int(ssl.CERT_NONE)
    root_path: str | None = None
    middleware: list[str] = field(default_factory=list)
    return_tokens_as_token_ids: bool = False
    disable_frontend_multiprocessing: bool = False
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    tool_parser_plugin: str = ""
    max_log_len: int | None = None
    disable_fastapi_docs: bool = False
    shutdown_timeout: float = 30.0

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> ServerArgs:
        """Read parsed flags, the environment's key and the template's file.

        Raises:
            ConfigError: flags contradict each other, or name a file that does not exist.
        """
        for name in _REFUSED:
            if getattr(namespace, name.replace("-", "_")):
                raise ConfigError(f"--{name}: adapters are not served; merge them into the model")
        given = {f.name: getattr(namespace, f.name) for f in fields(cls)}
        given["api_key"] = envs.VLLM_API_KEY or given["api_key"]
        given["chat_template"] = load_chat_template(given["chat_template"])
        given["response_role"] = given["response_role"] or "assistant"
        if given["enable_auto_tool_choice"] and not given["tool_call_parser"]:
            raise ConfigError("--enable-auto-tool-choice needs --tool-call-parser as well")
        if bool(given["ssl_keyfile"]) != bool(given["ssl_certfile"]) and given["ssl_keyfile"]:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile as well")
        return cls(**given)


def _nullable(text: str) -> str | None:
    return None if text in ("", "None") else text


def _json_list(text: str) -> list[str]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f'expected a JSON list of strings such as ["*"]: {text!r}')
    return value


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, 0 or more, got {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number, 0 or more, got {text!r}")
    return int(text)


def add_server_args(parser: FlexibleArgumentParser) -> None:
    """Add the server's flags, in groups."""
    _add_network_args(parser)
    _add_cors_args(parser)
    _add_chat_args(parser)
    _add_log_args(parser)


def _add_text(group: argparse._ArgumentGroup, name: str, metavar: str, *, help: str) -> None:
    group.add_argument(name, type=_nullable, default=None, metavar=metavar, help=help)


def _add_switch(group: argparse._ArgumentGroup, name: str, *, help: str) -> None:
    group.add_argument(name, action=StoreBoolean, default=False, help=help)


def _add_network_args(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("HTTP server")
    _add_text(group, "--host", "ADDRESS", help="address to listen on; all IPv4 addresses if unset")
    group.add_argument(
        "--port", metavar="N", type=_port, default=8000, help="TCP port; 0 takes a free one"
    )
    _add_text(
        group,
        "--api-key",
        "KEY",
        help="token that clients must send on every path but /health; VLLM_API_KEY wins",
    )
    _add_text(group, "--ssl-keyfile", "FILE", help="TLS private key")
    _add_text(group, "--ssl-certfile", "FILE", help="TLS certificate")
    _add_text(group, "--ssl-ca-certs", "FILE", help="TLS authorities that sign client certificates")
    group.add_argument(
        "--ssl-cert-reqs",
        metavar="N",
        type=int,
        choices=tuple(map(int, ssl.VerifyMode)),
        default=int(ssl.CERT_NONE),
        help="whether clients need a certificate: 0 no, 1 optional, 2 yes",
    )
    _add_text(group, "--root-path", "PATH", help="path prefix that a proxy in front removes")
    group.add_argument(
        "--middleware",
        metavar="NAME",
        action="append",
        default=[],
        help="ASGI class or coroutine function to wrap requests with, as module.name; repeatable",
    )
    group.add_argument(
        "--shutdown-timeout",
        metavar="SECONDS",
        type=_seconds,
        default=30.0,
        help="seconds that running requests get to finish after SIGTERM or Ctrl-C",
    )
    _add_switch(
        group,
        "--disable-frontend-multiprocessing",
        help="run the engine in the server's own process",
    )


def _add_cors_args(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("CORS")
    _add_switch(group, "--allow-credentials", help="allow browsers to send credentials")
    for name in ("origins", "methods", "headers"):
        group.add_argument(
            f"--allowed-{name}",
            metavar="LIST",
            type=_json_list,
            default=["*"],
            help=f"{name} that browsers may use, a JSON list",
        )


def _add_chat_args(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("chat and tools")
    group.add_argument(
        "--chat-template",
        metavar="TEMPLATE",
        type=_nullable,
        default=None,
        help="Jinja file, or the template itself, that replaces the tokenizer's",
    )
    group.add_argument(
        "--response-role",
        metavar="ROLE",
        type=_nullable,
        default="assistant",
        help="role of the answers",
    )
    _add_switch(
        group,
        "--enable-auto-tool-choice",
        help="let the model decide about tool calls; needs --tool-call-parser",
    )
    group.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        default=None,
        help="how the model writes tool calls: hermes, internlm, llama3_json, mistral, or a "
        "plugin's name",
    )
    group.add_argument(
        "--tool-parser-plugin",
        metavar="FILE",
        default="",
        help="Python file that registers more tool parsers",
    )
    _add_switch(group, "--return-tokens-as-token-ids", help="show tokens in logprobs as token_id:N")


def _add_log_args(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("server log")
    group.add_argument(
        "--uvicorn-log-level",
        choices=UVICORN_LOG_LEVELS,
        default="info",
        help="log level of the web server",
    )
    group.add_argument(
        "--max-log-len",
        metavar="N",
        type=_count,
        default=None,
        help="most characters and ids of a prompt in the log; all if unset",
    )
    _add_switch(
        group, "--disable-fastapi-docs", help="do not serve /docs, /redoc and /openapi.json"
    )


def add_refused_args(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group(
        "Adapters of the server (accepted by the parser, then refused)"
    )
    for name in _REFUSED:
        group.add_argument(f"--{name}", nargs="+", default=None, help="not served")
