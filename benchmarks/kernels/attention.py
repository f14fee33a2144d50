"""Attention of decode rows and of prompts on a GPU, beside what the machine's memory could do.

Run by hand (`python -m benchmarks.kernels.attention`), about a minute with the compilation; writes
`benchmarks/results/attention_gpu.json`. Decode reads a cold arena of several layers, scattered
blocks of 16 tokens, inside a CUDA graph; its share is bytes of visible K and V over the copy
bandwidth measured in the same run. A prompt's share is its floating point operations over those of
a large product. `--sweep decode` and `--sweep prompts` time other tiles instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.kernels.graph_timer import count_copies, measure_copy_bytes_per_s, measure_us
from vllm._custom_ops.triton.attention_args import AttentionArgs, JoinedRows
from vllm._custom_ops.triton.attention_decode import decode_attention
from vllm._custom_ops.triton.attention_join import join_rows
from vllm._custom_ops.triton.attention_prefill import prefill_attention
from vllm._custom_ops.triton.attention_shape import Splits, Tile, fit_decode_tile, fit_prefill_tile
from vllm._custom_ops.triton.cudnn import attend_equal_prompts, serves_rows

RESULTS = Path(__file__).resolve().parents[1] / "results" / "attention_gpu.json"
BLOCK_TOKENS = 16
UNIT_ELEMENTS = 128  # of bfloat16 in 256 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of a layer; `has_one_field` where a row is key and value at once."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int = 0
    has_one_field: bool = False

    @property
    def field_elements(self) -> int:
        """Elements of one field of a block."""
        return BLOCK_TOKENS * self.num_kv_heads * self.head_size

    @property
    def num_fields(self) -> int:
        """Fields of a layer."""
        return 1 if self.has_one_field else 2

    def count_bytes(self, num_rows: int, seq_len: int) -> int:
        """Return the bytes of K and V that rows of one length see."""
        seen = min(seq_len, self.window) if self.window else seq_len
        return num_rows * seen * self.num_fields * self.field_elements // BLOCK_TOKENS * 2


QWEN = Heads(name="28 heads, 4 KV, 128", num_heads=28, num_kv_heads=4, head_size=128)
GEMMA = Heads(name="8 heads, 4 KV, 256, window 1024", num_heads=8, num_kv_heads=4, head_size=256,
              window=1024)  # fmt: skip
LATENT = Heads(name="16 heads, latent 576", num_heads=16, num_kv_heads=1, head_size=576,
               has_one_field=True)  # fmt: skip
WIDE = Heads(name="16 heads, 2 KV, 256", num_heads=16, num_kv_heads=2, head_size=256)
WHOLE = Heads(name="8 heads, 4 KV, 256", num_heads=8, num_kv_heads=4, head_size=256)
EXPANDED = Heads(name="16 heads, 192", num_heads=16, num_kv_heads=16, head_size=192)
NEMOTRON = Heads(name="32 heads, 8 KV, 128", num_heads=32, num_kv_heads=8, head_size=128)
DECODE = [(heads, b, s) for heads in (QWEN, GEMMA, LATENT) for b in (1, 8, 64)
          for s in (768, 4096, 16384)]  # fmt: skip
SWEPT = [(QWEN, 1, 640), (QWEN, 8, 640), (QWEN, 16, 640), (QWEN, 64, 640), (QWEN, 256, 640),
         (QWEN, 64, 4096), (GEMMA, 1, 640), (GEMMA, 64, 640), (GEMMA, 32, 16384), (WIDE, 1, 640),
         (WIDE, 64, 640), (WIDE, 32, 8320), (NEMOTRON, 64, 640), (NEMOTRON, 32, 8320),
         (LATENT, 1, 640), (LATENT, 64, 640), (LATENT, 32, 8320)]  # fmt: skip
DECODE_SIZES = ((32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3),
                (128, 8, 2))  # fmt: skip
PREFILL_SIZES = {
    128: ((128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2)),
    256: ((128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4), (64, 32, 4, 3), (64, 64, 4, 2)),
}
PROMPTS = ((QWEN, 16, 0, 4096), (QWEN, 4, 2048, 2048), (QWEN, 1, 0, 1024), (QWEN, 32, 0, 200),
           (QWEN, 16, 0, 512), (QWEN, 1, 8192, 8160), (GEMMA, 1, 8192, 8192),
           (WHOLE, 1, 8192, 8192), (WIDE, 1, 0, 8192), (EXPANDED, 1, 0, 8192))  # fmt: skip
SWEPT_PROMPTS = ((QWEN, 16, 0, 512), (QWEN, 1, 0, 8192), (QWEN, 4, 2048, 2048),
                 (GEMMA, 1, 0, 8192), (GEMMA, 1, 8192, 8192), (WHOLE, 1, 8192, 8192),
                 (WIDE, 1, 0, 8192), (WIDE, 16, 0, 512), (EXPANDED, 1, 0, 8192))  # fmt: skip


def make_decode_args(heads: Heads, num_rows: int, seq_len: int) -> list[AttentionArgs]:
    """Return the arguments of as many layers as make each call a cold one."""
    num_layers = count_copies(heads.count_bytes(num_rows, seq_len))
    blocks = -(-seq_len // BLOCK_TOKENS)
    layer_elements = heads.num_fields * heads.field_elements
    block_units = num_layers * layer_elements // UNIT_ELEMENTS
    last_block = (num_rows * blocks - 1) * block_units
    num_elements = (last_block + block_units) * UNIT_ELEMENTS
    arena = torch.empty(num_elements, dtype=torch.bfloat16, device="cuda").normal_()
    offsets = torch.randperm(num_rows * blocks, device="cuda") * block_units
    row = heads.num_kv_heads * heads.head_size
    shape = (last_block + 1, BLOCK_TOKENS, heads.num_kv_heads, heads.head_size)
    strides = (UNIT_ELEMENTS, row, heads.head_size, 1)
    query = torch.randn(num_rows, heads.num_heads, heads.head_size, device="cuda").bfloat16()
    layers = []
    for layer in range(num_layers):
        key, value = (
            arena.as_strided(shape, strides, layer * layer_elements + field * heads.field_elements)
            for field in (0, heads.num_fields - 1)
        )
        layers.append(
            AttentionArgs(
                out=torch.empty_like(query),
                query=query,
                key_cache=key,
                value_cache=value,
                block_offsets=offsets.view(num_rows, blocks).int(),
                cu_query_lens=torch.arange(num_rows + 1, dtype=torch.int32, device="cuda"),
                seq_lens=torch.full((num_rows,), seq_len, dtype=torch.int32, device="cuda"),
                scale=heads.head_size**-0.5,
                window=heads.window,
                soft_cap=0.0,
                sinks=None,
                sink_tokens=0,
                chunk_tokens=0,
                fresh_key=None,
                fresh_value=None,
            )
        )
    return layers


def measure_decode(
    heads: Heads,
    layers: list[AttentionArgs],
    seq_len: int,
    copy_rate: float,
    tile: Tile | None = None,
    splits: Splits | None = None,
    max_seq_len: int | None = None,
) -> dict[str, object]:
    """Time decode rows of one length; `max_seq_len` is what a captured launch is told."""
    num_rows = layers[0].query.shape[0]
    longest = max_seq_len or seq_len
    time_us = measure_us(
        [partial(decode_attention, args, num_rows, longest, tile, splits) for args in layers]
    )
    least_us = heads.count_bytes(num_rows, seq_len) / copy_rate * 1e6
    return {
        "us": round(time_us, 2),
        "bytes": heads.count_bytes(num_rows, seq_len),
        "share_of_copy": round(least_us / time_us, 3),
    }


def make_prompt_args(heads: Heads, num_rows: int, computed: int, new: int) -> AttentionArgs:
    """Return arguments of prompts with `computed` cached and `new` new tokens each."""
    [decode] = make_decode_args(heads, num_rows, max(computed, BLOCK_TOKENS))[:1]
    parts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    tokens = num_rows * new
    qkv = torch.randn(tokens, sum(parts), heads.head_size, device="cuda", dtype=torch.bfloat16)
    query, key, value = qkv.split(parts, dim=1)
    lens = torch.arange(num_rows + 1, dtype=torch.int32, device="cuda") * new
    args = replace(
        decode,
        out=torch.empty(query.shape, device="cuda", dtype=qkv.dtype),
        query=query,
        cu_query_lens=lens,
        seq_lens=torch.full_like(decode.seq_lens, computed + new),
        fresh_key=key,
        fresh_value=value,
    )
    if computed == 0:
        return replace(args, key_cache=None, value_cache=None, block_offsets=None)
    return args


def time_calls_us(call: Callable[[], object], num_calls: int = 10) -> float:
    """Return the median time of a call that takes long enough to be timed alone."""
    call()
    times = []
    for _ in range(num_calls):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def measure_product_flops() -> float:
    """Return the floating point operations a second of a large bfloat16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (time_calls_us(lambda: a @ b) * 1e-6)


def count_prompt_flops(heads: Heads, num_rows: int, computed: int, new: int) -> int:
    """Return the operations of the pairs of tokens that see each other."""
    window = heads.window or computed + new
    pairs = sum(min(position + 1, window) for position in range(computed, computed + new))
    return 4 * num_rows * pairs * heads.num_heads * heads.head_size


def measure_prompts(
    heads: Heads,
    num_rows: int,
    computed: int,
    new: int,
    flops_rate: float,
    tile: Tile | None = None,
) -> dict[str, object]:
    """Time prompts by our kernel and, where they are whole, by torch's."""
    args = make_prompt_args(heads, num_rows, computed, new)
    flops = count_prompt_flops(heads, num_rows, computed, new)
    ours_us = time_calls_us(partial(prefill_attention, args, 0, num_rows, new, 1, tile))
    line: dict[str, object] = {
        "us": round(ours_us, 1),
        "tflop_per_s": round(flops / ours_us * 1e-6, 1),
        "share_of_product": round(flops / (ours_us * 1e-6) / flops_rate, 3),
    }
    if tile is not None:
        return line
    if computed > 0:
        line |= measure_joined(args, num_rows, computed, new)
    elif not heads.window and serves_rows(args.query, args.fresh_key, args.fresh_value):
        assert args.fresh_key is not None and args.fresh_value is not None
        torch_us = time_calls_us(
            partial(attend_equal_prompts, args.out, args.query, args.fresh_key, args.fresh_value,
                    new, args.scale)
        )  # fmt: skip
        line["torch_us"] = round(torch_us, 1)
        line["torch_tflop_per_s"] = round(flops / torch_us * 1e-6, 1)
    return line


def measure_joined(
    args: AttentionArgs, num_rows: int, computed: int, new: int
) -> dict[str, object]:
    """Time prompts that go on whose rows are laid behind each other first."""
    ends = torch.arange(num_rows + 1, dtype=torch.int32, device="cuda")
    kept = min(computed, args.window - 1) if args.window else computed
    joined = JoinedRows(
        cu_key_lens=ends * (kept + new), num_keys=num_rows * (kept + new), max_key_len=kept + new
    )
    time_us = time_calls_us(
        lambda: prefill_attention(join_rows(args, joined, 0, num_rows), 0, num_rows, new, 1)
    )
    return {"joined_us": round(time_us, 1)}


def list_decode_tiles(heads: Heads) -> Iterator[Tile]:
    """Yield tiles that are worth a try."""
    group = heads.num_heads // heads.num_kv_heads
    device = torch.device("cuda", 0)
    own = fit_decode_tile(group, heads.head_size, 2, heads.has_one_field, 2, device)
    for block_n, num_warps, num_stages in DECODE_SIZES:
        yield replace(own, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


def list_splits(heads: Heads, num_rows: int) -> Iterator[Splits | None]:
    """Yield our own number of splits and those that give a processor about 1 to 8 programs."""
    yield None
    groups = num_rows * heads.num_kv_heads
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for count in sorted({max(1, min(64, round(k * processors / groups))) for k in (1, 2, 3, 4)}):
        yield Splits(launched=count, even=count)


def list_prefill_tiles(heads: Heads) -> Iterator[Tile]:
    """Yield tiles that are worth a try."""
    for block_m, block_n, num_warps, num_stages in PREFILL_SIZES[128 << (heads.head_size > 128)]:
        yield Tile(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


def run_side_by_side(calls: list[Callable[[], object]]) -> None:
    """Compile what calls need on several threads; what cannot run here is reported and left out."""

    def attempt(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # too much shared memory for this GPU
            print(f"{call}: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)

    calls[0]()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(attempt, calls))
    torch.cuda.synchronize()


def sweep_decode(copy_rate: float) -> None:
    """Time other tiles and numbers of splits; a line for each goes to stderr."""
    small = {heads: make_decode_args(heads, 2, 64)[0] for heads, _, _ in SWEPT}
    run_side_by_side([
        partial(decode_attention, small[h], 2, 64, t) for h in small for t in list_decode_tiles(h)
    ])  # fmt: skip
    for heads, num_rows, seq_len in SWEPT:
        layers = make_decode_args(heads, num_rows, seq_len)
        for tile in list_decode_tiles(heads):
            for splits in list_splits(heads, num_rows):
                try_line(
                    f"{heads.name} b{num_rows} {seq_len} {tile} {splits}",
                    partial(measure_decode, heads, layers, seq_len, copy_rate, tile, splits),
                )


def sweep_prompts(flops_rate: float) -> None:
    """Time other tiles of prompts; a line for each goes to stderr."""
    kinds = {(heads, min(computed, 256)) for heads, _, computed, _ in SWEPT_PROMPTS}
    run_side_by_side([
        partial(prefill_attention, make_prompt_args(heads, 1, computed, 256), 0, 1, 256, 1, t)
        for heads, computed in kinds for t in list_prefill_tiles(heads)
    ])  # fmt: skip
    for heads, num_rows, computed, new in SWEPT_PROMPTS:
        for tile in list_prefill_tiles(heads):
            try_line(
                f"{heads.name} prompts {num_rows} x {computed}+{new} {tile}",
                partial(measure_prompts, heads, num_rows, computed, new, flops_rate, tile),
            )


def try_line(name: str, measure: Callable[[], dict[str, object]]) -> None:
    """Print what was measured, or why it cannot be."""
    try:
        print(name, json.dumps(measure()), file=sys.stderr, flush=True)
    except Exception as error:
        print(name, f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)


@torch.inference_mode()
def main() -> None:
    """Print a JSON line for each case and write all of them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", choices=("decode", "prompts"))
    parser.add_argument("--output-json", type=Path, default=RESULTS)
    options = parser.parse_args()
    copy_rate, flops_rate = measure_copy_bytes_per_s(), measure_product_flops()
    if options.sweep == "decode":
        sweep_decode(copy_rate)
        return
    if options.sweep == "prompts":
        sweep_prompts(flops_rate)
        return
    lines: list[dict[str, object]] = [
        {
            "device": torch.cuda.get_device_name(),
            "copy_tb_per_s": round(copy_rate / 1e12, 3),
            "product_tflop_per_s": round(flops_rate / 1e12, 1),
            "prefill_tile": str(fit_prefill_tile(128, 2, False, torch.device("cuda", 0))),
        }
    ]
    print(json.dumps(lines[0]), flush=True)
    for heads, num_rows, seq_len in DECODE:
        layers = make_decode_args(heads, num_rows, seq_len)
        line: dict[str, object] = {"decode": heads.name, "rows": num_rows, "tokens": seq_len}
        line |= measure_decode(heads, layers, seq_len, copy_rate)
        captured = measure_decode(heads, layers, seq_len, copy_rate, max_seq_len=32768)
        line["us_if_captured_for_32768"] = captured["us"]
        lines.append(line)
        print(json.dumps(line), flush=True)
        del layers
    for heads, num_rows, computed, new in PROMPTS:
        line = {"prompts": num_rows, "heads": heads.name, "computed": computed, "new": new}
        line |= measure_prompts(heads, num_rows, computed, new, flops_rate)
        lines.append(line)
        print(json.dumps(line), flush=True)
    options.output_json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
