"""How byte-level vocabularies cut text before merging, by the name that GGUF files give it.

Called by gguf_tokenizer.py. The patterns are part of each published tokenizer (its tokenizer.json).
Never tokenises by itself.
"""

from __future__ import annotations

from tokenizers import Regex
from tokenizers import pre_tokenizers as pre

from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD_OR_MARK = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD_OR_MARK}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD_OR_MARK}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_TEKKEN = rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"

_PATTERNS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "tekken": _TEKKEN,
}
# GPT-2's own cutting, after every digit has been set apart.
_DIGITS_FIRST = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}
_GPT2 = {"default", "gpt-2", "gpt2", "olmo", "mpt", "phi-2", "jina-en", "jina-es", "jina-de"}

# Vocabularies that take a piece found whole as it is, without replaying its merges.
IGNORES_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
# Vocabularies whose texts begin with BOS even if the file does not say so.
ADDS_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_NFC = frozenset({"qwen2", "deepseek-r1-qwen", "stablelm2"})


def uses_nfc(name: str) -> bool:
    """Whether the text is brought to Unicode's composed form first."""
    return name in _NFC


def make_splitter(name: str) -> pre.PreTokenizer:
    """Return the cutter that goes with a vocabulary; GPT-2's, with a warning, for unknown names."""
    pattern = _PATTERNS.get(name)
    if pattern is not None:
        return pre.Sequence(
            [
                pre.Split(Regex(pattern), behavior="isolated"),
                pre.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    gpt2 = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _DIGITS_FIRST:
        return pre.Sequence([pre.Digits(individual_digits=True), gpt2])
    if name not in _GPT2:
        warn_once(
            logger,
            f"The GGUF file's pre-tokenizer {name!r} is unknown; GPT-2's is used. Token ids of "
            "numbers and punctuation may differ from the model's; --tokenizer names a better one.",
        )
    return gpt2
