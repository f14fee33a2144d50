"""Ops between the products on a GPU: norms, activations, the op after QKV, argmax.

Run by hand on a GPU (`python -m benchmarks.kernels.elementwise`), under half a minute. Prints a
JSON line for each op and number of rows: time, and share of the copy bandwidth. Calls take turns on
as much memory as no cache holds; of one row, the time is that of launching one after the other.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.graph_timer import count_copies, measure_copy_bytes_per_s, measure_us
from vllm._custom_ops import activation, fused_qkv, norm, sampling

ROWS = (1, 64, 8192)
EPSILON = 1e-6
BLOCK_TOKENS = 16
UNIT_BYTES = 256
MAX_POSITIONS = 8192
DTYPE = torch.bfloat16
ITEM = DTYPE.itemsize

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One op over a number of rows.

    Attributes:
        num_bytes: read and written at least.
        make: returns a call on memory of its own.
    """

    name: str
    num_bytes: int
    make: Callable[[], Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """What the op between QKV and attention does for a model."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary_dim: int
    gate_size: int = 0
    norm_dtype: torch.dtype | None = None

    @property
    def width(self) -> int:
        """Elements of a row of queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    @property
    def token_bytes(self) -> int:
        """Bytes of a token that must move: all heads in, all but values out, two into the cache."""
        moved = self.num_heads + 2 * self.num_kv_heads + self.num_heads + 3 * self.num_kv_heads
        return moved * self.head_size * ITEM


HEAD_SHAPES = (
    HeadShape(model="qwen2", num_heads=28, num_kv_heads=4, head_size=128, rotary_dim=128),
    HeadShape(
        model="gemma3",
        num_heads=8,
        num_kv_heads=4,
        head_size=256,
        rotary_dim=256,
        norm_dtype=torch.float32,
    ),
    HeadShape(
        model="qwen3-next",
        num_heads=16,
        num_kv_heads=2,
        head_size=256,
        rotary_dim=64,
        gate_size=4096,
        norm_dtype=torch.float32,
    ),
)
NORM_SIZES = {"qwen2": 3584, "gemma3": 2560, "qwen3-next": 2048}
GATED_SIZES = {"qwen2.silu": 18944, "gemma3.gelu_tanh": 10240, "qwen3-next.silu": 512}
RELU2_SIZE = 21504
VOCAB_SIZE = 152064


def draw(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Return normal numbers."""
    return torch.randn(*shape, dtype=dtype, device="cuda")


def make_norm(rows: int, size: int, weight_dtype: torch.dtype, num_added: int) -> Call:
    """Return a norm, after no addition, after one, or after a norm and an addition."""
    x, residual = draw(rows, size), draw(rows, size)
    first, second = (draw(size, dtype=weight_dtype) for _ in range(2))
    if num_added == 0:
        return partial(norm.rms_norm, x, x, first, EPSILON)
    if num_added == 1:
        return partial(norm.fused_add_rms_norm, x, residual, first, EPSILON)
    return partial(norm.norm_add_rms_norm, x, residual, first, second, EPSILON)


def list_norms(rows: int) -> Iterator[Work]:
    """Yield the norms of hidden states."""
    for model, size in NORM_SIZES.items():
        weight_dtype = torch.float32 if model == "gemma3" else DTYPE
        for num_added, name in enumerate(("norm", "add_norm", "norm_add_norm")):
            yield Work(
                name=f"{model}.{name}",
                num_bytes=rows * size * ITEM * (2 if num_added == 0 else 4),
                make=partial(make_norm, rows, size, weight_dtype, num_added),
            )


def make_gated(rows: int, size: int, op: Callable[[Tensor, Tensor], None]) -> Call:
    """Return a gated activation."""
    return partial(op, draw(rows, size), draw(rows, 2 * size))


def make_relu2(rows: int) -> Call:
    """Return relu2 in place."""
    x = draw(rows, RELU2_SIZE)
    return partial(activation.relu2, x, x)


def list_activations(rows: int) -> Iterator[Work]:
    """Yield the activations of MLPs."""
    for name, size in GATED_SIZES.items():
        op = activation.silu_and_mul if name.endswith("silu") else activation.gelu_tanh_and_mul
        yield Work(
            name=name,
            num_bytes=3 * rows * size * ITEM,
            make=partial(make_gated, rows, size, op),
        )
    yield Work(
        name="nemotron.relu2",
        num_bytes=2 * rows * RELU2_SIZE * ITEM,
        make=partial(make_relu2, rows),
    )


def make_heads(rows: int, shape: HeadShape) -> Call:
    """Return the op after QKV over tokens in blocks of their own."""
    qkv = draw(rows, shape.gate_size + shape.width)[:, shape.gate_size :]
    kv_size = shape.num_kv_heads * shape.head_size
    field_bytes = BLOCK_TOKENS * kv_size * ITEM
    num_blocks = -(-rows // BLOCK_TOKENS)
    arena = torch.zeros(num_blocks * 2 * field_bytes // ITEM, dtype=DTYPE, device="cuda")
    block_units = 2 * field_bytes // UNIT_BYTES
    size = ((num_blocks - 1) * block_units + 1, BLOCK_TOKENS, shape.num_kv_heads, shape.head_size)
    strides = (UNIT_BYTES // ITEM, kv_size, shape.head_size, 1)
    key_cache = arena.as_strided(size, strides)
    value_cache = arena.as_strided(size, strides, field_bytes // ITEM)
    tokens = torch.arange(rows, device="cuda")
    slots = torch.stack((tokens // BLOCK_TOKENS * block_units, tokens % BLOCK_TOKENS), -1).int()
    weight = None if shape.norm_dtype is None else draw(shape.head_size, dtype=shape.norm_dtype)
    table = draw(MAX_POSITIONS, shape.rotary_dim, dtype=torch.float32)
    return partial(
        fused_qkv.qkv_norm_rope_cache,
        qkv,
        tokens,
        slots,
        key_cache,
        value_cache,
        weight,
        weight,
        EPSILON,
        table,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_size,
        shape.rotary_dim,
        True,
    )


def make_argmax(rows: int) -> Call:
    """Return the argmax of float32 logits."""
    logits = draw(rows, VOCAB_SIZE, dtype=torch.float32)
    return partial(sampling.argmax, torch.empty(rows, dtype=torch.int64, device="cuda"), logits)


def list_works(rows: int) -> Iterator[Work]:
    """Yield all ops."""
    yield from list_norms(rows)
    yield from list_activations(rows)
    for shape in HEAD_SHAPES:
        yield Work(
            name=f"{shape.model}.qkv",
            num_bytes=rows * shape.token_bytes,
            make=partial(make_heads, rows, shape),
        )
    if rows <= 512:
        yield Work(name="argmax", num_bytes=rows * VOCAB_SIZE * 4, make=partial(make_argmax, rows))


@torch.inference_mode()
def main() -> None:
    """Print a JSON line for each op and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--ops", nargs="*", default=[""], help="what their names begin with")
    args = parser.parse_args()
    copy_rate = measure_copy_bytes_per_s()
    print(json.dumps({"copy_tb_per_s": round(copy_rate / 1e12, 3)}), flush=True)
    for rows in args.rows:
        for work in list_works(rows):
            if not work.name.startswith(tuple(args.ops)):
                continue
            time_us = measure_us([work.make() for _ in range(count_copies(work.num_bytes))])
            share = work.num_bytes / (time_us * 1e-6) / copy_rate
            line = {
                "op": work.name,
                "rows": rows,
                "us": round(time_us, 2),
                "share": round(share, 3),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
