"""Ids to text, id by id, against the tokenizers library's own decoding in one piece."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.utils.fixtures_models import build_chain_tokenizer
from vllm.transformers_utils.detokenizer import (
    ByteDetokenizer,
    TokenBytes,
    WindowDetokenizer,
    make_detokenizer,
)

TEXT = "中文🌶é and hello"


def build_piece_tokenizer(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    """A SentencePiece-like vocabulary: 256 byte tokens, a few words, one special token."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)}
    for piece in ("▁", "a", "b", "▁ab", "é", "中", "▁▁"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool ▁x>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def piece_decoder(*, strip: bool) -> decoders.Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


def push_all(detokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.push([i]) for i in ids]


def test_bytes_of_a_character_wait_for_each_other() -> None:
    table = TokenBytes(build_chain_tokenizer())
    detokenizer = make_detokenizer(table, [65])
    pieces = push_all(detokenizer, list(TEXT.encode()))
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)
    assert pieces[:3] == ["", "", "中"]
    assert b"".join(table[i] for i in TEXT.encode()) == TEXT.encode()


def test_an_unfinished_character_is_never_shown() -> None:
    detokenizer = make_detokenizer(TokenBytes(build_chain_tokenizer()), [])
    assert "".join(push_all(detokenizer, list(TEXT.encode())[:8])) == "中文"
    assert detokenizer.pending == "🌶".encode()[:2]


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip: bool) -> None:
    tokenizer = build_chain_tokenizer()
    ids = [256, 263, 65, 264, 265, 300, 66]
    text = "".join(
        push_all(make_detokenizer(TokenBytes(tokenizer), [], skip_special_tokens=skip), ids)
    )
    assert text == ("DEAB" if skip else "DE<s>A</s><|im_end|>B")
    assert TokenBytes(tokenizer)[300] == b"", "a padded row of the model is no token"


@pytest.mark.parametrize(
    ("decoder", "is_exact"),
    [
        (piece_decoder(strip=True), True),
        (piece_decoder(strip=False), True),
        (decoders.Metaspace(), True),
        (decoders.BPEDecoder(), False),
    ],
    ids=["strip", "gemma", "metaspace", "other"],
)
@pytest.mark.parametrize("seed", range(5))
def test_equals_the_tokenizer_in_one_piece(decoder, is_exact: bool, seed: int) -> None:
    tokenizer = build_piece_tokenizer(decoder)
    table = TokenBytes(tokenizer)
    assert table.is_exact == is_exact
    rng = random.Random(seed)
    choices = [*range(256, 263), 263, 264, *range(65, 75)]
    ids = [rng.choice(choices) for _ in range(40)]
    for cut in (0, 3, 20):
        detokenizer = make_detokenizer(table, ids[:cut])
        assert isinstance(detokenizer, ByteDetokenizer if is_exact else WindowDetokenizer)
        got = "".join(push_all(detokenizer, ids[cut:]))
        whole, head = (
            tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:cut])
        )
        assert got == whole[len(head) :] if is_exact else whole.endswith(got)


def test_first_space_is_cut_only_at_the_start_of_a_text() -> None:
    tokenizer = build_piece_tokenizer(piece_decoder(strip=True))
    table = TokenBytes(tokenizer)
    assert make_detokenizer(table, [263]).push([259]) == "ab", "nothing but <s> stands before"
    assert make_detokenizer(table, [263, 257]).push([259]) == " ab"


def test_window_detokenizer_gives_up_on_bytes_that_are_no_text() -> None:
    detokenizer = WindowDetokenizer(
        build_chain_tokenizer(), [], skip_special_tokens=True, spaces_between_special_tokens=True
    )
    text = "".join(push_all(detokenizer, [0xFF] * 100))
    assert text.count("\ufffd") > 60
    assert "".join(push_all(detokenizer, list(TEXT.encode()))).endswith(TEXT[-5:])


def test_token_text_in_context() -> None:
    table = TokenBytes(build_chain_tokenizer())
    data = "é".encode()
    assert table.decode_one(data[0]) == ""
    assert table.decode_one(data[1], pending=data[:1]) == "é"
    assert table.decode_one(65, pending=data[:1]) == "A", "an alternative that breaks the character"
    assert table.decode_one(data[1]) == ""
    assert table.decode_one(256) == "DE"
