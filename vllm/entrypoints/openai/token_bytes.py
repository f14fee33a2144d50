"""The bytes that a token stands for, also where it is only a part of a character.

Used for the `bytes` members of chat log-probabilities: joined over an answer they are its UTF-8.
Reads the tokenizer's vocabulary and kind of decoder; never decodes text.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_MARK = "\u2581"  # sentencepiece's visible space


class TokenBytes:
    """Looks up the bytes of tokens in a byte-level or byte-fallback vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        decoder = _decoder_description(tokenizer)
        self._is_byte_level = "ByteLevel" in decoder
        self._has_byte_fallback = "ByteFallback" in decoder
        self._known: dict[int, bytes | None] = {}

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of the text by skip_special_tokens."""
        return token_id in self._special_ids

    def find(self, token_id: int) -> bytes | None:
        """Return the token's own bytes, or None where the vocabulary does not tell them."""
        if token_id not in self._known:
            self._known[token_id] = self._look_up(token_id)
        return self._known[token_id]

    def _look_up(self, token_id: int) -> bytes | None:
        if token_id in self._added:
            return self._added[token_id].encode()
        if not (self._is_byte_level or self._has_byte_fallback):
            return None
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return None
        if self._is_byte_level:
            letters = _byte_of_letter()
            return bytes(letters[c] for c in token) if all(c in letters for c in token) else None
        one_byte = _BYTE_TOKEN.fullmatch(token)
        if one_byte:
            return bytes([int(one_byte[1], 16)])
        return token.replace(_WORD_MARK, " ").encode()


def _decoder_description(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the decoder's own serialised form, "" for a tokenizer that is not a fast one."""
    if not tokenizer.is_fast:
        return ""
    decoder = tokenizer.backend_tokenizer.decoder
    return "" if decoder is None else bytes(decoder.__getstate__()).decode()


@cache
def _byte_of_letter() -> dict[str, int]:
    """Map each letter of byte-level vocabularies to its byte.

    Bytes that print stand for themselves; the others, in order, take the code points from 256 on.
    Source: the byte-level BPE format of GPT-2 vocabularies.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    letters = {chr(byte): byte for byte in printing}
    letters.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return letters
