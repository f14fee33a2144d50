"""Where the prompts of the load tests come from: random tokens, ShareGPT files, sonnets.

Every sample is a text with the number of its tokens and the number of tokens to generate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_MAX_DISTINCT_TOKENS = 20_000
MIN_LEN = 4
MAX_PROMPT_LEN = 1024
MAX_TOTAL_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request of a load."""

    prompt: str
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShape:
    """Lengths of random prompts.

    Attributes:
        range_ratio: lengths are drawn from [ratio * length, length].
        prefix_len: tokens at the start that all prompts share.
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 1.0
    prefix_len: int = 0


def sample_random(
    tokenizer: PreTrainedTokenizerBase, num_samples: int, shape: RandomShape, seed: int = 0
) -> list[Sample]:
    """Draw prompts of random ordinary tokens; their lengths are counted after re-tokenising."""
    draw = np.random.default_rng(seed)
    ordinary = _ordinary_ids(tokenizer, draw)
    prefix = draw.choice(ordinary, shape.prefix_len).tolist()
    low_input = max(1, int(shape.input_len * shape.range_ratio))
    low_output = max(1, int(shape.output_len * shape.range_ratio))
    input_lens = draw.integers(low_input, shape.input_len + 1, num_samples)
    output_lens = draw.integers(low_output, shape.output_len + 1, num_samples)
    samples = []
    for input_len, output_len in zip(input_lens.tolist(), output_lens.tolist(), strict=True):
        text, length = _make_text(tokenizer, prefix + draw.choice(ordinary, input_len).tolist())
        samples.append(Sample(prompt=text, prompt_len=length, output_len=output_len))
    return samples


def _ordinary_ids(
    tokenizer: PreTrainedTokenizerBase, draw: np.random.Generator
) -> NDArray[np.int64]:
    """Return a part of the vocabulary: tokens that are whole characters and not special."""
    specials = set(tokenizer.all_special_ids)
    some = draw.permutation(len(tokenizer))[:_MAX_DISTINCT_TOKENS].tolist()
    whole = [i for i in some if i not in specials and "\ufffd" not in str(tokenizer.decode([i]))]
    return np.array(whole)


def _make_text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[str, int]:
    """Return a text of about these tokens that does not become longer when tokenised again."""
    wanted = len(ids)
    for _ in range(8):
        text = str(tokenizer.decode(ids))
        again = tokenizer.encode(text, add_special_tokens=False)
        if len(again) <= wanted:
            return text, len(again)
        ids = again[:wanted]
    return text, len(again)


def sample_sharegpt(
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    num_samples: int,
    output_len: int | None = None,
    seed: int = 0,
) -> list[Sample]:
    """Take the first turns of conversations of a ShareGPT file, shuffled; odd lengths are left out.

    Raises:
        ConfigError: the file is missing, of another form, or holds too few conversations.
    """
    turns = list(_read_conversations(path))
    np.random.default_rng(seed).shuffle(turns)
    samples: list[Sample] = []
    for prompt, answer in turns:
        if len(samples) == num_samples:
            break
        prompt_len = len(tokenizer.encode(prompt))
        length = output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        if prompt_len < MIN_LEN or (output_len is None and length < MIN_LEN):
            continue
        if prompt_len > MAX_PROMPT_LEN or prompt_len + length > MAX_TOTAL_LEN:
            continue
        samples.append(Sample(prompt=prompt, prompt_len=prompt_len, output_len=length))
    if len(samples) < num_samples:
        raise ConfigError(
            f"{path}: holds {len(samples)} usable conversations, but {num_samples} are asked for"
        )
    return samples


def _read_conversations(path: str) -> Iterator[tuple[str, str]]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        for entry in data:
            talk = entry.get("conversations", [])
            if len(talk) >= 2:
                yield talk[0]["value"], talk[1]["value"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise ConfigError(
            f"{path}: not a ShareGPT file (a JSON list of objects with `conversations`): {cause!r}"
        ) from cause


@dataclass(frozen=True, slots=True, kw_only=True)
class SonnetShape:
    """Lengths of prompts made of lines of poems; `prefix_len` tokens are the same in all."""

    input_len: int = 550
    output_len: int = 150
    prefix_len: int = 200


def sample_sonnets(
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    num_samples: int,
    shape: SonnetShape,
    seed: int = 0,
) -> list[Sample]:
    """Make prompts from the lines of a text file, up to about the length that is asked for.

    Raises:
        ConfigError: the file is missing or empty, or the prefix is longer than the prompt.
    """
    if shape.prefix_len > shape.input_len:
        raise ConfigError("--sonnet-prefix-len may not exceed --sonnet-input-len")
    try:
        lines = [ln for ln in Path(path).read_text(encoding="utf-8").splitlines(True) if ln.strip()]
    except OSError as cause:
        raise ConfigError(f"{path}: {cause.strerror}") from cause
    if not lines:
        raise ConfigError(f"{path}: holds no lines")
    line_len = max(1.0, float(np.mean([len(tokenizer.encode(ln)) for ln in lines])))
    intro = "Pick as many lines as you can from these poem lines:\n"
    room = max(0, shape.input_len - len(tokenizer.encode(intro)))
    num_lines, num_prefix = round(room / line_len), round(shape.prefix_len / line_len)
    draw = np.random.default_rng(seed)
    samples = []
    for _ in range(num_samples):
        drawn = draw.integers(0, len(lines), max(0, num_lines - num_prefix)).tolist()
        prompt = intro + "".join([*lines[:num_prefix], *(lines[i] for i in drawn)])
        length = len(tokenizer.encode(prompt))
        samples.append(Sample(prompt=prompt, prompt_len=length, output_len=shape.output_len))
    return samples
