"""Tokenizers built from GGUF metadata against the libraries that the vocabularies come from."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.utils.fixtures_gguf import bytes_to_letters, write_fx_gguf
from vllm.errors import ConfigError
from vllm.transformers_utils.gguf_file import read_gguf
from vllm.transformers_utils.gguf_tokenizer import read_tokenizer
from vllm.transformers_utils.pre_tokenizers import make_splitter
from vllm.transformers_utils.tokenizer import get_tokenizer

_CORPUS = [
    "The river ran past the old mill, and the children played on its banks in 2018 and 2019.",
    "def main():\n    for i in range(10):\n        print(i, end='\\n\\n')\n\treturn None",
    "Größe, naïve café; 中文字符和日本語, эти слова. Don't we'll I'M THEY'RE it's",
    "Mixed    spaces and\n\n\nlines, numbers 3.14159 and 1,000,000; e-mail: a.b@c.de",
    "CamelCaseWords andsomethingElse HTTPServer2 __init__ <tag/> #5 $3.50 100%",
] * 20
_PROBES = [
    *_CORPUS[:5],
    "",
    " ",
    "  two leading",
    "trailing ",
    "unseen: ﷺ 🌶🌶 \u200b \x00 é e\u0301",
    "1 12 123 1234 12345",
    "<s>hello</s> hello<think> x",
]


def write_tokenizer(path: Path, tokenizer: dict[str, Any], arch: str = "llama") -> Path:
    """Write a file that holds a tokenizer and nothing else."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in tokenizer.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
            add[type(value)](name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def train_sentencepiece(**options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS),
        model_writer=model,
        model_type="bpe",
        byte_fallback=True,
        vocab_size=600,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def describe_sentencepiece(
    sp: sentencepiece.SentencePieceProcessor, **flags: Any
) -> dict[str, Any]:
    ids = range(sp.get_piece_size())
    kinds = [
        2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in ids
    ]
    return {
        "model": "llama",
        "tokens": [sp.id_to_piece(i) for i in ids],
        "scores": [sp.get_score(i) for i in ids],
        "token_type": kinds,
        "bos_token_id": sp.bos_id(),
        "eos_token_id": sp.eos_id(),
        "unknown_token_id": sp.unk_id(),
        **flags,
    }


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_ids(has_prefix: bool, tmp_path: Path) -> None:
    sp = train_sentencepiece(add_dummy_prefix=has_prefix)
    path = write_tokenizer(
        tmp_path / "spm.gguf", describe_sentencepiece(sp, add_space_prefix=has_prefix)
    )
    tokenizer = get_tokenizer(str(path))
    for text in _PROBES[:-1]:
        if text:
            assert tokenizer(text, add_special_tokens=False).input_ids == sp.encode(text), repr(
                text
            )
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert tokenizer("hello").input_ids[0] == sp.bos_id()  # the kind's default
    assert tokenizer("a <s>b", add_special_tokens=False).input_ids.count(sp.bos_id()) == 1


def test_gemma_runs_of_spaces(tmp_path: Path) -> None:
    """Converters write Gemma's runs of spaces as spaces, and its scores do not tell its order."""
    letters = ["a", "b", "c", "ab", "abc", "\u2581", "\u2581a", "  ", "   ", "\n", "\n\n"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *letters, *[f"<0x{i:02X}>" for i in range(256)]]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * len(tokens),
        "token_type": [3] * 4 + [1] * 7 + [4] * 4 + [6] * 256,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_bos_token": True,
        "add_space_prefix": False,
    }
    tokenizer = get_tokenizer(str(write_tokenizer(tmp_path / "g.gguf", metadata, "gemma3")))
    for text, pieces in (
        ("abc a", ["abc", "\u2581a"]),
        ("a   b", ["a", "\u2581" * 3, "b"]),
        ("a\n\nb", ["a", "\n\n", "b"]),
        ("é", ["<0xC3>", "<0xA9>"]),
    ):
        ids = tokenizer(text).input_ids
        assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", *pieces]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def train_byte_level(splitter: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def describe_byte_level(tokenizer: Tokenizer, **flags: Any) -> dict[str, Any]:
    import json

    model = json.loads(tokenizer.to_str())["model"]
    tokens = [t for t, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    size = len(tokens)
    return {
        "model": "gpt2",
        "tokens": [*tokens, "<s>", "</s>", "<think>"],
        "token_type": [1] * size + [3, 3, 4],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": size,
        "eos_token_id": size + 1,
        **flags,
    }


# As published in the tokenizer.json of a model of each kind.
_PUBLISHED = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?"
    r"[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?"
    r"[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def published_splitter(name: str) -> pre_tokenizers.PreTokenizer:
    if name in _PUBLISHED:
        split = pre_tokenizers.Split(Regex(_PUBLISHED[name]), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), gpt2])
    return gpt2


@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", *_PUBLISHED])
def test_byte_level_ids(pre: str, tmp_path: Path) -> None:
    trained = train_byte_level(published_splitter(pre))
    path = write_tokenizer(tmp_path / "bpe.gguf", describe_byte_level(trained, pre=pre))
    tokenizer = get_tokenizer(str(path))
    for text in _PROBES[:-1]:
        if pre == "qwen2" and "\u0301" in text:
            continue  # composed first, see below
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == trained.encode(text).ids, repr(text)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("pre", ["default", "smollm", *_PUBLISHED])
def test_marked_tokens_match_as_a_whole(pre: str, tmp_path: Path) -> None:
    trained = train_byte_level(published_splitter(pre))
    metadata = describe_byte_level(trained, pre=pre, add_bos_token=False)
    bos = metadata["bos_token_id"]
    tokenizer = get_tokenizer(str(write_tokenizer(tmp_path / "bpe.gguf", metadata)))
    ids = tokenizer(_PROBES[-1]).input_ids
    assert ids[0] == bos and bos + 1 in ids and bos + 2 in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello hello<think> x"
    assert sorted(tokenizer.all_special_ids) == [bos, bos + 1]
    assert len(tokenizer) == bos + 3


def test_qwen_composes_characters(tmp_path: Path) -> None:
    trained = train_byte_level(published_splitter("qwen2"))
    path = write_tokenizer(tmp_path / "q.gguf", describe_byte_level(trained, pre="qwen2"))
    tokenizer = get_tokenizer(str(path))
    assert tokenizer("e\u0301").input_ids == tokenizer("é").input_ids


@pytest.mark.parametrize(
    ("flags", "starts", "ends"),
    [
        ({"pre": "default"}, False, False),
        ({"pre": "qwen2"}, False, False),
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
        ({"pre": "default", "add_bos_token": True}, True, False),
        ({"pre": "default", "add_eos_token": True}, False, True),
        ({"pre": "default", "add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_bos_and_eos(flags: dict[str, Any], starts: bool, ends: bool, tmp_path: Path) -> None:
    trained = train_byte_level(published_splitter("default"))
    path = write_tokenizer(tmp_path / "t.gguf", describe_byte_level(trained, **flags))
    tokenizer = get_tokenizer(str(path))
    inner = tokenizer("hello", add_special_tokens=False).input_ids
    bos, eos = [tokenizer.bos_token_id] * starts, [tokenizer.eos_token_id] * ends
    assert tokenizer("hello").input_ids == [*bos, *inner, *eos]
    assert tokenizer("hello", "hello").input_ids == [*bos, *inner, *eos] * 2


def letters_vocabulary(*more: str, **flags: Any) -> dict[str, Any]:
    letters = bytes_to_letters()
    tokens = [*(letters[byte] for byte in range(256)), *more]
    kinds = [1] * len(tokens)
    return {"model": "gpt2", "tokens": tokens, "token_type": kinds, "add_bos_token": False, **flags}


@pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", [256]), ("qwen2", [119, 104, 111])])
def test_only_some_kinds_take_pieces_whole(pre: str, ids: list[int], tmp_path: Path) -> None:
    """Llama 3 has pieces that no merge makes; a piece found whole is taken as it is."""
    metadata = letters_vocabulary("who", "xy", pre=pre, merges=["x y"])
    assert (
        get_tokenizer(str(write_tokenizer(tmp_path / "t.gguf", metadata)))("who").input_ids == ids
    )


def test_merges_without_a_token_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = letters_vocabulary("xy", merges=["a b", "x y", "x nothing"])
    tokenizer = get_tokenizer(str(write_tokenizer(tmp_path / "t.gguf", metadata)))
    assert tokenizer("abxy").input_ids == [97, 98, 256]
    assert "2 merges" in caplog.text


def test_an_unknown_cut_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    make_splitter("some-new-model")
    assert "some-new-model" in caplog.text and "--tokenizer" in caplog.text


def test_a_file_without_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "none.gguf", {})
    with pytest.raises(ConfigError, match="--skip-tokenizer-init"):
        get_tokenizer(str(path))


def test_an_unknown_kind_is_named(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "t.gguf", {"model": "rwkv", "tokens": ["a"]})
    with pytest.raises(ConfigError, match=r"'rwkv'.*'gpt2'.*'llama'"):
        get_tokenizer(str(path))


def test_chat_template_and_length_come_from_the_file(tmp_path: Path) -> None:
    path = write_fx_gguf(
        tmp_path / "fx.gguf",
        metadata={
            "tokenizer.chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}"
        },
    )
    made = read_tokenizer(read_gguf(path))
    assert made.model_max_len == 512
    tokenizer = get_tokenizer(str(path))
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "[hi]"
    assert tokenizer("hi").input_ids == [104, 105]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
