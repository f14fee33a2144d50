"""Sizes that small steps with prompts are padded to, so that few CUDA graphs serve them all.

Asked by the GPU input batch when it builds a step, and by the runner when it captures. What is
chosen depends on lengths alone, never on whether there are graphs: a step has the same shapes, so
the same kernels and the same bits, with --enforce-eager.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm.attention.backends.long_prompts import MAX_CHUNK_TOKENS
from vllm.worker.block_table import Int64Array

MAX_COMPUTED_TOKENS = 1024
"""Of a prompt that goes on in a padded step of more than MAX_CHUNK_TOKENS: its keys are not split
between programs, which few new tokens behind many others need. Those of decode rows and of smaller
steps are, so that such rows may be of any length."""

_TOKENS = {
    (0, 1): (16, 64, 128, 256, 384, 512, 640, 768, 896, 1024),
    (0, 32): (128, 256, 512, 1024),
    (16, 4): (64, 128, 256, 512),
    (64, 8): (128, 256, 512),
}
"""Tokens of prompts beside so many decode rows and prompts.

One prompt alone is what users wait for most, and has no row of padding. Its sizes lie close where
kernels take as long as the host; with more rows or tokens than these the host is ahead of them.
"""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PromptSize:
    """What a padded step has room for; decode rows and their tokens come first.

    Attributes:
        num_prompt_tokens: of all rows with more than one new token.
        num_prompt_rows: those rows.
        num_decode_rows: rows with one new token.
    """

    num_prompt_tokens: int
    num_prompt_rows: int
    num_decode_rows: int

    @property
    def num_tokens(self) -> int:
        """New tokens, padding counted."""
        return self.num_decode_rows + self.num_prompt_tokens

    @property
    def num_rows(self) -> int:
        """Rows, padding counted."""
        return self.num_decode_rows + self.num_prompt_rows


def list_prompt_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[PromptSize, ...]:
    """Return the sizes of an engine, ascending; none holds more than one of them needs to."""
    sizes = set()
    for (num_decode_rows, num_prompt_rows), counts in _TOKENS.items():
        for num_tokens in _take_needed(counts, max_num_batched_tokens):
            sizes.add(
                PromptSize(
                    num_prompt_tokens=num_tokens,
                    num_prompt_rows=min(num_prompt_rows, max_num_seqs),
                    num_decode_rows=min(num_decode_rows, max_num_seqs),
                )
            )
    return tuple(sorted(sizes))


def _take_needed(counts: Iterable[int], most: int) -> list[int]:
    """Return the counts up to the first that holds `most`."""
    taken: list[int] = []
    for count in counts:
        if taken and taken[-1] >= most:
            break
        taken.append(count)
    return taken


def find_prompt_size(
    sizes: Sequence[PromptSize], new_lens: Int64Array, computed_lens: Int64Array
) -> PromptSize | None:
    """Return the smallest size for a step, or None where it is not to be padded.

    Args:
        sizes: ascending.
        new_lens: new tokens of each row, those of decode rows (one) first, int64 [B].
        computed_lens: tokens before them, int64 [B].
    """
    num_decode_rows = int((new_lens == 1).sum())
    num_prompt_rows = len(new_lens) - num_decode_rows
    num_tokens = int(new_lens[num_decode_rows:].sum())
    is_long = computed_lens[num_decode_rows:].max(initial=0) > MAX_COMPUTED_TOKENS
    most_tokens = MAX_CHUNK_TOKENS if is_long else sizes[-1].num_prompt_tokens if sizes else 0
    fitting = (
        size
        for size in sizes
        if num_tokens <= size.num_prompt_tokens <= most_tokens
        and size.num_prompt_rows >= num_prompt_rows
        and size.num_decode_rows >= num_decode_rows
    )
    return min(fitting, key=lambda size: (size.num_tokens, size.num_rows), default=None)
