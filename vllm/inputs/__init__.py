"""Prompt types, and how a prompt is told apart."""

from vllm.inputs.data import (
    ExplicitEncoderDecoderPrompt,
    PromptType,
    SingletonPrompt,
    TextPrompt,
    TokensPrompt,
    token_inputs,
)
from vllm.inputs.parse import ParsedPrompt, parse_prompt
from vllm.inputs.registry import INPUT_REGISTRY, InputRegistry

__all__ = [
    "INPUT_REGISTRY",
    "ExplicitEncoderDecoderPrompt",
    "InputRegistry",
    "ParsedPrompt",
    "PromptType",
    "SingletonPrompt",
    "TextPrompt",
    "TokensPrompt",
    "parse_prompt",
    "token_inputs",
]
