"""Which steps with prompts are padded, and to what."""

from __future__ import annotations

import numpy as np
import pytest

from vllm.worker.prompt_size import (
    MAX_COMPUTED_TOKENS,
    PromptSize,
    find_prompt_size,
    list_prompt_sizes,
)


def find(new_lens: list[int], computed: int = 0, num_seqs: int = 256) -> PromptSize | None:
    """Return the size of a step whose rows all have the same number of tokens before it."""
    lens = np.array(new_lens, dtype=np.int64)
    return find_prompt_size(list_prompt_sizes(num_seqs, 8192), lens, np.full_like(lens, computed))


@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(256, 8192), (48, 500), (1, 16), (8, 64)])
def test_sizes_are_as_large_as_a_step_can_be(num_seqs: int, num_tokens: int) -> None:
    sizes = list_prompt_sizes(num_seqs, num_tokens)
    assert sizes == tuple(sorted(set(sizes)))
    assert all(max(s.num_prompt_rows, s.num_decode_rows) <= num_seqs for s in sizes)
    assert any(s.num_prompt_tokens >= min(num_tokens, 1024) for s in sizes)
    assert sum(s.num_prompt_tokens >= num_tokens for s in sizes) <= 4, "one for each kind of rows"
    assert len(sizes) <= 21, "each is captured at the start"


def test_a_step_takes_the_smallest_size() -> None:
    assert find([13]) == PromptSize(num_prompt_tokens=16, num_prompt_rows=1, num_decode_rows=0)
    assert find([512]) == PromptSize(num_prompt_tokens=512, num_prompt_rows=1, num_decode_rows=0)
    several = PromptSize(num_prompt_tokens=512, num_prompt_rows=32, num_decode_rows=0)
    assert find([100, 300]) == find([13] * 30) == several
    size = PromptSize(num_prompt_tokens=64, num_prompt_rows=4, num_decode_rows=16)
    assert find([1, 13]) == find([1] * 16 + [64]) == size
    assert size.num_tokens == 80
    assert size.num_rows == 20
    assert find([1] * 17 + [2]) == PromptSize(
        num_prompt_tokens=128, num_prompt_rows=8, num_decode_rows=64
    )
    few = find([1, 1, 13], num_seqs=8)
    assert few is not None
    assert few.num_decode_rows == 8


def test_large_steps_are_not_padded() -> None:
    assert find([1024]) is not None
    assert find([1025]) is None
    assert find([1] * 65 + [2]) is None
    assert find([2] * 33) is None
    assert find([1] + [2] * 9) is None
    assert find([1, 513]) is None


def test_what_comes_before_the_step() -> None:
    """Where many tokens are behind long prompts, those are split over their keys elsewhere."""
    assert find([129], MAX_COMPUTED_TOKENS) is not None
    assert find([129], MAX_COMPUTED_TOKENS + 1) is None
    assert find([128], 100_000) is not None, "all of its rows are split"
    assert find([1, 1], 100_000) is not None
    sizes = list_prompt_sizes(8, 512)
    new_lens, computed = np.array([1, 20]), np.array([100_000, 0])
    assert find_prompt_size(sizes, new_lens, computed) is not None
