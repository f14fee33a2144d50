"""The interface of tool parsers, and the table of their names.

A parser reads what a model writes when it wants a tool called. Users add parsers with
--tool-parser-plugin: a Python file that registers classes here. One parser serves one answer.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from vllm.entrypoints.openai.chat_request import ChatCompletionRequest
from vllm.entrypoints.openai.response import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
)
from vllm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ToolParser:
    """Base of every parser.

    Attributes:
        prev_tool_call_arr, streamed_args_for_tool: what a plugin has parsed and streamed so far;
            the rest of the last call's arguments is sent with the finish chunk.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model_tokenizer = tokenizer
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.streamed_args_for_tool: list[str] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False

    @property
    def is_incomplete(self) -> bool:
        """Whether what was streamed so far ends inside a call; a plugin need not say so."""
        return False

    def adjust_request(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        """Return the request as the parser needs it, e.g. with special tokens kept."""
        return request

    def extract_tool_calls(
        self, model_output: str, request: ChatCompletionRequest
    ) -> ExtractedToolCallInformation:
        """Read a whole answer."""
        raise NotImplementedError

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: ChatCompletionRequest,
    ) -> DeltaMessage | None:
        """Read on; returns what is new, or None where nothing can be said yet."""
        raise NotImplementedError

    def finish_streaming(self) -> DeltaMessage | None:
        """Return what is left to send when the answer has ended."""
        if not self.prev_tool_call_arr or not self.streamed_args_for_tool:
            return None
        arguments = self.prev_tool_call_arr[-1].get("arguments", {})
        wanted = json.dumps(arguments, ensure_ascii=False)
        sent = self.streamed_args_for_tool[-1]
        if not wanted.startswith(sent) or wanted == sent:
            return None
        rest = DeltaFunctionCall(arguments=wanted[len(sent) :])
        return DeltaMessage(
            tool_calls=[DeltaToolCall(index=len(self.prev_tool_call_arr) - 1, function=rest)]
        )


ParserClass = TypeVar("ParserClass", bound=type[ToolParser])


class ToolParserManager:
    """The table: name -> parser class."""

    tool_parsers: ClassVar[dict[str, type[ToolParser]]] = {}

    @classmethod
    def get_tool_parser(cls, name: str) -> type[ToolParser]:
        """Return the class registered under a name.

        Raises:
            KeyError: nothing is; the message lists the names.
        """
        if name not in cls.tool_parsers:
            known = ", ".join(sorted(cls.tool_parsers))
            raise KeyError(f"unknown tool parser {name!r}; known: {known}")
        return cls.tool_parsers[name]

    @classmethod
    def register_module(
        cls, name: str | list[str] | None = None, force: bool = True, module: Any = None
    ) -> Callable[[ParserClass], ParserClass]:
        """Register a class, as a decorator or (with `module`) at once.

        Raises:
            KeyError: the name is taken and `force` is false.
            TypeError: the class is no ToolParser.
        """

        def register(parser: ParserClass) -> ParserClass:
            if not issubclass(parser, ToolParser):
                raise TypeError(f"{parser!r} must be a subclass of ToolParser")
            names = [name] if isinstance(name, str) else name or [parser.__name__]
            for each in names:
                if not force and each in cls.tool_parsers:
                    raise KeyError(f"tool parser {each!r} is already registered")
                cls.tool_parsers[each] = parser
            return parser

        return register if module is None else register(module)

    @classmethod
    def import_tool_parser(cls, path: str) -> None:
        """Run a plugin file, which registers its parsers.

        Raises:
            ConfigError: the file is missing or raises.
        """
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        if spec is None or spec.loader is None or not Path(path).is_file():
            raise ConfigError(f"--tool-parser-plugin {path!r}: no such Python file")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as cause:  # a plugin is foreign code
            raise ConfigError(f"--tool-parser-plugin {path!r}: {cause!r}") from cause
