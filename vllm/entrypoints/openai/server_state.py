"""Puts the serving classes together around a running engine."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.logger import RequestLogger
from vllm.entrypoints.openai.logprobs import LogprobRenderer
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.entrypoints.openai.serving_chat import ChatSettings, OpenAIServingChat
from vllm.entrypoints.openai.serving_completion import OpenAIServingCompletion
from vllm.entrypoints.openai.serving_engine import ServingEngine
from vllm.entrypoints.openai.serving_tokens import OpenAIServingTokenization
from vllm.entrypoints.openai.tool_parsers import ToolParser, ToolParserManager
from vllm.errors import ConfigError
from vllm.transformers_utils.detokenizer import TokenBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What the routes use."""

    engine: EngineClient
    chat: OpenAIServingChat
    completion: OpenAIServingCompletion
    tokens: OpenAIServingTokenization


def find_tool_parser(args: ServerArgs) -> type[ToolParser] | None:
    """Load the plugin, if any, and return the parser that was chosen, if automatic choice is on.

    Raises:
        ConfigError: the plugin or the parser does not exist.
    """
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if not args.enable_auto_tool_choice or args.tool_call_parser is None:
        return None
    try:
        return ToolParserManager.get_tool_parser(args.tool_call_parser)
    except KeyError as cause:
        raise ConfigError(f"--tool-call-parser: {cause.args[0]}") from cause


async def make_server_state(
    engine: EngineClient, args: ServerArgs, *, logs_requests: bool
) -> ServerState:
    """Build the serving classes for an engine that runs."""
    config = await engine.get_model_config()
    tokenizer = None if config.skip_tokenizer_init else await engine.get_tokenizer()
    serving = ServingEngine(
        engine=engine,
        model_config=config,
        tokenizer=tokenizer,
        logprobs=LogprobRenderer(
            None if tokenizer is None else TokenBytes(tokenizer),
            as_token_ids=args.return_tokens_as_token_ids,
        ),
        request_logger=RequestLogger(max_log_len=args.max_log_len) if logs_requests else None,
    )
    settings = ChatSettings(
        response_role=args.response_role,
        chat_template=args.chat_template,
        tool_parser=find_tool_parser(args),
    )
    return ServerState(
        engine=engine,
        chat=OpenAIServingChat(serving, settings),
        completion=OpenAIServingCompletion(serving),
        tokens=OpenAIServingTokenization(serving, args.chat_template),
    )
