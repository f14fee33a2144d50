"""Agreement over ranks, the start-up proof, and the capacity report."""

from __future__ import annotations

import pytest

from tests.core.builders import full_group, full_specs
from vllm.core.capacity import make_layout, make_uniform_groups
from vllm.errors import ConfigError


def test_the_poorest_rank_decides():
    """Case C38."""
    group = full_group(block_tokens=16)
    size = group.block_bytes
    layout, report = make_layout(
        [[group], [group]], [size * 100, size * 81], max_model_len=64, max_num_batched_tokens=64
    )
    assert layout.num_superblocks == 80  # one is for padding
    assert layout.groups[0].blocks_per_superblock == 1
    assert report.groups[0].waste == 0
    assert report.max_concurrency == 20
    assert report.tokens_at_max_len == 80 * 16
    assert report.bytes_per_sequence == 4 * size


def test_ranks_of_different_sizes_agree_on_ids():
    wide, narrow = full_group(heads=4), full_group(heads=1)
    layout, report = make_layout(
        [[wide], [narrow]],
        [wide.block_bytes * 100, narrow.block_bytes * 150],
        max_model_len=32,
        max_num_batched_tokens=32,
    )
    assert layout.num_superblocks == 99
    assert report.superblock_bytes == wide.block_bytes


def test_ranks_that_disagree_are_refused():
    with pytest.raises(ConfigError, match="differs between ranks"):
        make_layout(
            [[full_group(layers=(0, 1))], [full_group(layers=(0, 2))]],
            [1 << 20] * 2,
            max_model_len=8,
            max_num_batched_tokens=8,
        )


def test_ranks_with_other_groups_are_refused():
    with pytest.raises(ConfigError, match=r"rank 1 reports.*sliding.*rank 0 reports.*full"):
        make_layout(
            [[full_group("full")], [full_group("sliding")]],
            [1 << 20] * 2,
            max_model_len=8,
            max_num_batched_tokens=8,
        )


def test_override_gives_exactly_that_many_blocks():
    group = full_group(block_tokens=16)
    layout, _ = make_layout(
        [[group]], [0], max_model_len=192, max_num_batched_tokens=64, num_blocks=12
    )
    assert layout.num_superblocks * layout.groups[0].blocks_per_superblock == 12


def test_start_up_proof():
    """Case C11, start-up half."""
    group = full_group(block_tokens=16)
    sizes = {"max_num_batched_tokens": 64, "num_blocks": 12}
    make_layout([[group]], [0], max_model_len=192, **sizes)
    with pytest.raises(
        ConfigError, match=r"holds 12 .*512 tokens needs 32.*lower max_model_len to 192"
    ):
        make_layout([[group]], [0], max_model_len=512, **sizes)
    make_layout([[group]], [0], max_model_len=512, check_max_model_len=False, **sizes)


def test_too_small_for_one_block():
    group = full_group()
    with pytest.raises(ConfigError, match="cache block has"):
        make_layout([[group]], [100], max_model_len=8, max_num_batched_tokens=8)


def test_uniform_groups():
    specs = full_specs(layers=(0, 1, 2))
    (group,) = make_uniform_groups(specs, 16)
    assert group.layers == (0, 1, 2)
    with pytest.raises(ConfigError, match="no layer"):
        make_uniform_groups([], 16)
