"""Token ids to text, a few ids at a time.

`TokenBytes` knows the bytes that each id stands for; a `Detokenizer` keeps one sequence's place in
its byte stream and gives out whole characters only, so that no half character is ever shown and
the cost of a token does not depend on the length of the text. Called by
`engine/output_processor.py` and by the HTTP layer (bytes of log-probabilities). Never imports
torch, never loads a tokenizer.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPACE_MARK = "\u2581"  # stands for a space in SentencePiece vocabularies
_REPLACEMENT = "\ufffd"
_NUM_CONTEXT_TOKENS = 7
_MAX_WINDOW_TOKENS = 32
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    others = (b for b in range(256) if chr(b) not in alphabet)
    alphabet.update({chr(0x100 + i): b for i, b in enumerate(list(others))})
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[letter] for letter in token])
    except KeyError:  # an added token, stored as plain text
        return token.encode()


def _sentence_piece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace(_SPACE_MARK, " ").encode()


def _metaspace_bytes(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode()


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _choose_bytes(steps: Sequence[dict[str, Any]]) -> tuple[Callable[[str], bytes] | None, bool]:
    """Return the function of a decoder from token to bytes, and whether a first space is cut.

    The function is None for decoders whose tokens do not have bytes of their own.
    """
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes, False
    if kinds == ["Metaspace"] and steps[0].get("replacement") == _SPACE_MARK:
        return _metaspace_bytes, steps[0].get("prepend_scheme") != "never"
    cuts = False
    for step in steps:
        kind = step["type"]
        if kind == "Replace":
            known = step["pattern"] == {"String": _SPACE_MARK} and step["content"] == " "
        elif kind == "Strip":
            known = step["content"] == " " and step["start"] == 1 and step["stop"] == 0
            cuts = True
        else:
            known = kind in ("ByteFallback", "Fuse")
        if not known:
            return None, False
    if "ByteFallback" not in kinds:
        return None, False
    return _sentence_piece_bytes, cuts


class TokenBytes(dict[int, bytes]):
    """The bytes of every id of one tokenizer, looked up by index and remembered.

    An id outside the vocabulary stands for no bytes.

    Attributes:
        special_ids: ids left out when special tokens are skipped.
        is_exact: whether the bytes of a sequence are the bytes of its ids, one after the other. If
            not, the bytes are those of each id decoded alone.
        cuts_first_space: whether a space at the very start of a text is dropped.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._to_bytes: Callable[[str], bytes] | None = None
        self.cuts_first_space = False
        self.special_ids: frozenset[int]
        if tokenizer.is_fast:
            backend = tokenizer.backend_tokenizer
            self._to_bytes, self.cuts_first_space = _choose_bytes(_decoder_steps(backend.decoder))
            self._id_to_token: Callable[[int], str | None] = backend.id_to_token
            added = backend.get_added_tokens_decoder()
            self.special_ids = frozenset(i for i, token in added.items() if token.special)
        else:
            self.special_ids = frozenset(tokenizer.all_special_ids)

    @property
    def is_exact(self) -> bool:
        """Whether every id has bytes of its own, whatever stands beside it."""
        return self._to_bytes is not None

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = value = self._compute(token_id)
        return value

    def _compute(self, token_id: int) -> bytes:
        if token_id < 0:
            return b""
        if self._to_bytes is None:
            return decode_ids(self.tokenizer, [token_id], skip_special_tokens=False).encode()
        token = self._id_to_token(token_id)
        return b"" if token is None else self._to_bytes(token)

    def decode_one(self, token_id: int, pending: bytes = b"") -> str:
        """Return the text of one token, as it reads behind an unfinished character.

        Args:
            token_id: any id.
            pending: the bytes of that character so far.
        Returns: "" for a token that is only a part of a character.
        """
        own = self[token_id]
        for data in (pending + own, own) if pending else (own,):
            text = _new_utf8_decoder("replace").decode(data)
            if _REPLACEMENT not in text:
                return text
        return _new_utf8_decoder("ignore").decode(own)


def decode_ids(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool = True,
) -> str:
    """Decode ids in one piece; unknown ids are left out, spaces are not cleaned up."""
    options: dict[str, Any] = {"skip_special_tokens": skip_special_tokens}
    if not tokenizer.is_fast:
        options["spaces_between_special_tokens"] = spaces_between_special_tokens
    text = tokenizer.decode(
        [i for i in token_ids if 0 <= i < len(tokenizer)],
        clean_up_tokenization_spaces=False,
        **options,
    )
    assert isinstance(text, str), "one sequence decodes to one text"
    return text


class Detokenizer(Protocol):
    """One sequence's place in its text."""

    @property
    def pending(self) -> bytes:
        """Bytes of a character that is not finished yet."""
        ...

    def push(self, token_ids: Iterable[int]) -> str:
        """Take new ids and return the characters that they complete."""
        ...


class ByteDetokenizer:
    """For vocabularies whose tokens have bytes of their own: constant cost for each token."""

    __slots__ = ("_decoder", "_skipped", "_starts_text", "_table")

    def __init__(
        self, table: TokenBytes, context_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        """Start behind `context_ids`, the end of the prompt."""
        self._table = table
        self._skipped = table.special_ids if skip_special_tokens else frozenset()
        self._decoder = _new_utf8_decoder("replace")
        context = context_ids[-_NUM_CONTEXT_TOKENS:]
        self._starts_text = table.cuts_first_space and all(i in self._skipped for i in context)

    @property
    def pending(self) -> bytes:
        """Bytes of a character that is not finished yet."""
        return self._decoder.getstate()[0]

    def push(self, token_ids: Iterable[int]) -> str:
        """Take new ids and return the characters that they complete."""
        table, skipped = self._table, self._skipped
        data = b"".join([table[i] for i in token_ids if i not in skipped])
        if self._starts_text and data:
            data = data.removeprefix(b" ")
            self._starts_text = False
        return self._decoder.decode(data)


class WindowDetokenizer:
    """For every other tokenizer: decodes a short window of tokens again and again.

    New text is what the window's text grew by. While it ends inside a character nothing is given
    out; a window that stays so for long holds bytes that are no text, and is shown as they are.
    """

    __slots__ = ("_ids", "_options", "_prefix", "_read", "_tokenizer")

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> None:
        """Start behind `context_ids`, the end of the prompt."""
        self._tokenizer = tokenizer
        self._options = {
            "skip_special_tokens": skip_special_tokens,
            "spaces_between_special_tokens": spaces_between_special_tokens,
        }
        self._ids = list(context_ids[-_NUM_CONTEXT_TOKENS:])
        self._prefix = 0
        self._read = len(self._ids)

    @property
    def pending(self) -> bytes:
        """Always empty: such tokenizers do not tell bytes."""
        return b""

    def push(self, token_ids: Iterable[int]) -> str:
        """Take new ids and return the characters that they complete."""
        return "".join([self._push_one(i) for i in token_ids])

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        before = decode_ids(self._tokenizer, self._ids[self._prefix : self._read], **self._options)
        text = decode_ids(self._tokenizer, self._ids[self._prefix :], **self._options)
        is_stuck = len(self._ids) - self._read > _MAX_WINDOW_TOKENS
        if len(text) <= len(before) or (text.endswith(_REPLACEMENT) and not is_stuck):
            return ""
        del self._ids[: self._read]
        self._prefix, self._read = 0, len(self._ids)
        return text[len(before) :]


def make_detokenizer(
    table: TokenBytes,
    context_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> Detokenizer:
    """Return the detokenizer that fits the tokenizer of `table`, behind a prompt."""
    if table.is_exact:
        return ByteDetokenizer(table, context_ids, skip_special_tokens=skip_special_tokens)
    return WindowDetokenizer(
        table.tokenizer,
        context_ids,
        skip_special_tokens=skip_special_tokens,
        spaces_between_special_tokens=spaces_between_special_tokens,
    )
