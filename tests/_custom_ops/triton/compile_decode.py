"""Compiles decode attention with every tile that a batch may choose, for a GPU that is not there.

python -m tests._custom_ops.triton.compile_decode 80   # 86, 90, 120; as compile_for.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from tests._custom_ops.triton.compile_for import BF16, main
from tests._custom_ops.triton.test_attention import Problem, make_args
from vllm._custom_ops.triton.attention_decode import chunk_attention, decode_attention
from vllm._custom_ops.triton.attention_shape import fit_decode_tile

NUM_GROUPS = (1, 2, 100, 1000)


def attend(problem: Problem) -> None:
    """Rows of one new token, in batches of all sizes, and of a few."""
    args = make_args(replace(problem, rows=((300, 1), (40, 1)), is_fresh=False).arguments())
    tiles = {
        fit_decode_tile(
            args.group, problem.head_size, problem.dtype.itemsize, args.has_one_field, num_groups,
            torch.device("cpu"),
        )
        for num_groups in NUM_GROUPS
    }  # fmt: skip
    for tile in tiles:
        decode_attention(args, 2, 32768, tile)
    ends = make_args(replace(problem, rows=((300, 5), (40, 3))).arguments())
    chunk_attention(ends, torch.tensor([0, 1], dtype=torch.int32), 5, 305)


def case(
    heads: int,
    kv_heads: int,
    size: int,
    *,
    dtype: torch.dtype = BF16,
    has_one_field: bool = False,
) -> Callable[[], None]:
    """Return what compiles for heads of a size."""
    return partial(
        attend,
        Problem(
            rows=(), heads=heads, kv_heads=kv_heads, head_size=size, dtype=dtype,
            has_one_field=has_one_field,
        ),
    )  # fmt: skip


CASES: dict[str, Callable[[], None]] = {
    "Qwen2": case(28, 4, 128),
    "gpt-oss": case(64, 8, 64),
    "Gemma 3": case(8, 4, 256),
    "large heads": case(4, 2, 320),
    "largest heads": case(4, 2, 640),
    "DeepSeek-V2-Lite": case(16, 1, 576, has_one_field=True),
    "DeepSeek-V2": case(128, 1, 576, has_one_field=True),
    "many heads, float32": case(32, 1, 128, dtype=torch.float32),
    "large heads, float32": case(4, 2, 256, dtype=torch.float32),
    "latent rows, float32": case(16, 1, 576, dtype=torch.float32, has_one_field=True),
}

if __name__ == "__main__":
    sys.exit(main(CASES))
