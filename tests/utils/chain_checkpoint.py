"""One FX-CHAIN checkpoint for all HTTP cases: what it answers depends on the prompt's last byte.

A loops for ever; C spells DEF G HI J K and ends; ~ spells 中文🌶é byte by byte and ends; anything
else ends at once.
"""

from __future__ import annotations

from pathlib import Path

from tests.utils.fixtures_models import (
    build_chain,
    build_chain_tokenizer,
    chain_text,
    save_checkpoint,
)

SPLIT_TEXT = "中文🌶é"
ENDLESS_TOKENS = 32768
"""The context length: a request that a test interrupts must not end by itself on a fast machine."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{% for t in tools %}tool: {{ t.function.name }}\n{% endfor %}{% endif %}"
    "{{ messages[-1].content[-1:] }}"
)
"""Ends with the last letter of the last message, so that a chat answers as a completion does."""

_DEF, _HI = 257, 258


def build_cases_checkpoint(directory: Path) -> Path:
    """Write the checkpoint and return its directory."""
    table = {
        ord("A"): ord("A"),
        ord("C"): _DEF,
        _DEF: ord("G"),
        ord("G"): _HI,
        _HI: ord("J"),
        ord("J"): ord("K"),
        ord("~"): SPLIT_TEXT.encode()[0],
        **chain_text(SPLIT_TEXT),
    }
    model = build_chain(table, max_position_embeddings=ENDLESS_TOKENS)
    return save_checkpoint(model, directory, build_chain_tokenizer(CHAT_TEMPLATE))
