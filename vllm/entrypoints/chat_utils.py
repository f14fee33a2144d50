"""The names of 0.6.3's chat helpers, kept importable from their old place.

The work is done in `vllm.entrypoints.openai.chat_template`; nothing else lives here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai.chat_template import (
    ChatMessage,
    load_chat_template,
    parse_chat_messages,
    render_chat_template,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatCompletionMessageParam = Mapping[str, Any]
ConversationMessage = ChatMessage


def apply_hf_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Sequence[ConversationMessage],
    chat_template: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Render a parsed conversation; see `render_chat_template`."""
    return render_chat_template(
        tokenizer,
        conversation,
        chat_template=chat_template,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )


__all__ = [
    "ChatCompletionMessageParam",
    "ConversationMessage",
    "apply_hf_chat_template",
    "load_chat_template",
    "parse_chat_messages",
    "render_chat_template",
]
