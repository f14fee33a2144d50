"""The tokenizer that a GGUF file's metadata amounts to.

Called by `tokenizer.get_tokenizer` for GGUF files. Builds a `tokenizers.Tokenizer` straight from
the vocabulary: byte-level BPE with the merges of the file ("gpt2"), or sentencepiece BPE with
merges derived from the scores ("llama", also Gemma). Special ids, BOS and EOS flags and the chat
template come from the file too. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
)

from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.transformers_utils.gguf_file import GGUFFile
from vllm.transformers_utils.pre_tokenizers import ADDS_BOS, IGNORES_MERGES, make_splitter, uses_nfc

logger = init_logger(__name__)

# Token types of the format.
_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"  # how sentencepiece writes a space
_GEMMA = ("gemma", "gemma2", "gemma3")


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTokenizer:
    """A tokenizer and what transformers needs to know about it.

    Attributes:
        backend: the tokenizer, BOS and EOS included where the file asks for them.
        special_tokens: bos_token, eos_token, unk_token, pad_token, those that the file names.
    """

    backend: Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None
    model_max_len: int | None


def read_tokenizer(file: GGUFFile) -> GGUFTokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        ConfigError: no vocabulary in the file, or a kind of tokenizer that is not served.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    tokens = [str(t) for t in file.array("tokenizer.ggml.tokens")]
    if kind is None or not tokens:
        raise ConfigError(
            f"{file.path} holds no tokenizer. Give one with --tokenizer, or --skip-tokenizer-init."
        )
    if kind == "gpt2":
        backend = _byte_level(file, tokens)
    elif kind == "llama":
        backend = _sentencepiece(file, tokens)
    else:
        raise ConfigError(
            f"{file.path} has a tokenizer of kind {kind!r}. Served: 'gpt2' (byte-level BPE) and "
            "'llama' (sentencepiece BPE). Give another tokenizer with --tokenizer."
        )
    _add_marked_tokens(backend, tokens, file.array("tokenizer.ggml.token_type"))
    special = _special_tokens(file, tokens)
    _add_bos_eos(backend, file, special)
    return GGUFTokenizer(
        backend=backend,
        special_tokens=special,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        model_max_len=file.get("context_length"),
    )


def _byte_level(file: GGUFFile, tokens: Sequence[str]) -> Tokenizer:
    """Byte-level BPE: vocabulary and merges as the file lists them."""
    pre = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_read_merges(file, vocab),
            fuse_unk=False,
            ignore_merges=pre in IGNORES_MERGES,
        )
    )
    if uses_nfc(pre):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = make_splitter(pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _read_merges(file: GGUFFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Read the merges of a file, those left out that make no token of the vocabulary."""
    merges: list[tuple[str, str]] = []
    num_moot = 0
    for line in file.array("tokenizer.ggml.merges"):
        # The space between the parts, not one that a part may start with.
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if left in vocab and right in vocab and left + right in vocab:
            merges.append((left, right))
        else:
            num_moot += 1
    if num_moot:
        logger.warning(
            "%s: %d merges of the tokenizer make no token of its vocabulary and are left out.",
            file.path,
            num_moot,
        )
    return merges


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """Sentencepiece BPE with byte fallback."""
    unk_id = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if file.architecture in _GEMMA:
        # Converters write Gemma's runs of spaces as such; in the vocabulary they are pieces.
        tokens = [_SPACE * len(t) if t.isspace() and not t.strip(" ") else t for t in tokens]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _derive_merges(vocab, _merge_order(file, tokens))
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=tokens[unk_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    restore = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", _SPACE)
    is_prefixed = file.architecture not in _GEMMA
    if file.metadata.get("tokenizer.ggml.add_space_prefix", is_prefixed):
        # Text that starts with a space gets one more, as sentencepiece has it.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        restore.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(restore)
    return backend


def _merge_order(file: GGUFFile, tokens: Sequence[str]) -> Iterable[str]:
    """Return the tokens in the order in which they are merged, first merge first.

    That is by falling score; Gemma's files keep the order of the vocabulary instead, their scores
    do not tell it.
    """
    scores = file.array("tokenizer.ggml.scores")
    if file.architecture in _GEMMA or len(scores) != len(tokens):
        return tokens
    return (tokens[i] for i in sorted(range(len(tokens)), key=lambda i: -scores[i]))


def _derive_merges(vocab: dict[str, int], ordered: Iterable[str]) -> list[tuple[str, str]]:
    """List every way to make a token from two others, in merge order, longer left parts first."""
    merges: list[tuple[str, str]] = []
    for token in ordered:
        for cut in range(len(token) - 1, 0, -1):
            right = token[cut:]
            if right in vocab:
                left = token[:cut]
                if left in vocab:
                    merges.append((left, right))
    return merges


def _add_marked_tokens(backend: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Make control and user-defined tokens match in the raw text, as a whole."""
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED) and backend.token_to_id(token) is not None
    ]
    # One call each keeps special tokens special; ids are those of the vocabulary.
    backend.add_special_tokens([t for t in added if t.special])
    backend.add_tokens([t for t in added if not t.special])


def _special_tokens(file: GGUFFile, tokens: Sequence[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for role, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        token_id = file.metadata.get(f"tokenizer.ggml.{key}")
        if token_id is not None and 0 <= token_id < len(tokens):
            named[role] = tokens[token_id]
    return named


def _add_bos_eos(backend: Tokenizer, file: GGUFFile, special: dict[str, str]) -> None:
    """Add BOS before and EOS after a text where the file, or its kind of tokenizer, says so."""
    meta = file.metadata
    is_sentencepiece = meta["tokenizer.ggml.model"] == "llama"
    default_bos = is_sentencepiece or meta.get("tokenizer.ggml.pre") in ADDS_BOS
    wants_bos = meta.get("tokenizer.ggml.add_bos_token", default_bos)
    wants_eos = meta.get("tokenizer.ggml.add_eos_token", False)
    bos = special.get("bos_token") if wants_bos else None
    eos = special.get("eos_token") if wants_eos else None
    if bos is None and eos is None:
        return
    single = [t for t in (bos, "$A", eos) if t]
    pair = single + [f"{t}:1" for t in (bos, "$B", eos) if t]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=pair,
        special_tokens=[(t, backend.token_to_id(t)) for t in dict.fromkeys((bos, eos)) if t],
    )
