"""What one attention layer is given to do: how many rows, how long, and what that must cost.

The counts of bytes and operations are those of the task, not of a kernel: what any kernel has to
move and to compute at least.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vllm.attention.backends.abstract import KernelQuery


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Rows that are alike.

    Attributes:
        num_cached: tokens of each row before this step.
        num_new: tokens of each row in this step.
    """

    phase: Literal["decode", "prefill"]
    num_rows: int
    num_cached: int
    num_new: int

    @property
    def seq_len(self) -> int:
        """Tokens of a row after the step."""
        return self.num_cached + self.num_new

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.num_rows * self.num_new


def list_loads(
    batch_sizes: Iterable[int], context_lens: Iterable[int], prompt_lens: Iterable[int]
) -> tuple[Load, ...]:
    """Return a decode step for each batch size and context length, and a prefill for each prompt.

    Args:
        batch_sizes: decoding rows.
        context_lens: tokens of a decoding row, the new one counted.
        prompt_lens: tokens of a prompt that is computed alone, nothing of it cached.
    """
    contexts, prompts = tuple(context_lens), tuple(prompt_lens)
    decodes = (
        Load(phase="decode", num_rows=size, num_cached=length - 1, num_new=1)
        for size in batch_sizes
        for length in contexts
    )
    prefills = (Load(phase="prefill", num_rows=1, num_cached=0, num_new=n) for n in prompts)
    return (*decodes, *prefills)


def count_visible(query: KernelQuery, position: int) -> int:
    """Return how many tokens the one at `position` (from 0) sees, itself counted."""
    first = 0
    if query.window:
        first = max(first, position + 1 - query.window)
    if query.chunk_tokens:
        first = max(first, position // query.chunk_tokens * query.chunk_tokens)
    return position + 1 - first + min(first, query.sink_tokens)


def count_bytes(query: KernelQuery, load: Load) -> int:
    """Return the bytes to move: queries in, results out, and each visible row of K and V once."""
    last = load.seq_len - 1
    # The union of what consecutive tokens see starts where the first of them looks.
    num_visible = min(
        load.seq_len, count_visible(query, last - load.num_new + 1) + load.num_new - 1
    )
    num_fields = 1 if query.has_one_field else 2
    row_bytes = num_fields * query.num_kv_heads * query.head_size * query.kv_dtype.itemsize
    token_bytes = 2 * query.num_heads * query.head_size * query.dtype.itemsize
    return load.num_tokens * token_bytes + load.num_rows * num_visible * row_bytes


def count_flops(query: KernelQuery, load: Load) -> int:
    """Return the additions and multiplications of the two matrix products over visible pairs."""
    num_pairs = sum(count_visible(query, p) for p in range(load.num_cached, load.seq_len))
    return 4 * load.num_rows * num_pairs * query.num_heads * query.head_size
