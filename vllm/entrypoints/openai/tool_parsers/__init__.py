"""Tool parsers: built-in ones by name, plugins from files."""

from vllm.entrypoints.openai.tool_parsers.abstract import ToolParser, ToolParserManager
from vllm.entrypoints.openai.tool_parsers.builtin import (
    HermesToolParser,
    InternlmToolParser,
    Llama3JsonToolParser,
    MistralToolParser,
)

__all__ = [
    "HermesToolParser",
    "InternlmToolParser",
    "Llama3JsonToolParser",
    "MistralToolParser",
    "ToolParser",
    "ToolParserManager",
]
