"""Time of whole steps of a SmolLM2-135M with random weights, through the ops alone.

Run by hand (`python -m benchmarks.kernels.whole_model`): no engine, no files. A step is embedding,
fused decoder layers, output matrix, argmax. Other processes on the same cores disturb it: read the
minima, compare alternating runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm._custom_ops.decoder import DecoderLayer, DecoderStack, PackedLinear, decoder_layers
from vllm._custom_ops.library import cpu_isa
from vllm._custom_ops.linear import embedding, linear, pack_linear_weight
from vllm._custom_ops.sampling import argmax
from vllm.worker.cache_engine import allocate_arena

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, LAYERS, VOCAB = 576, 9, 3, 64, 1536, 30, 49152
BLOCK_TOKENS = 16
UNIT_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Rows of a step: each has `cached` tokens before it and `new` in it."""

    name: str
    num_rows: int
    cached: int
    new: int


WORKLOADS = (
    Workload(name="decode, batch 1", num_rows=1, cached=192, new=1),
    Workload(name="decode, batch 8", num_rows=8, cached=192, new=1),
    Workload(name="decode, batch 32", num_rows=32, cached=192, new=1),
    Workload(name="decode, batch 1, long", num_rows=1, cached=4000, new=1),
    Workload(name="prefill 128", num_rows=1, cached=0, new=128),
    Workload(name="prefill 512", num_rows=1, cached=0, new=512),
    Workload(name="prefill 512 after 1536", num_rows=1, cached=1536, new=512),
)


class Model:
    """Random weights of SmolLM2-135M, packed."""

    def __init__(self, dtype: torch.dtype) -> None:
        def matrix(n: int, k: int) -> PackedLinear:
            return PackedLinear(packed=pack_linear_weight((torch.randn(n, k) * k**-0.5).to(dtype)))

        norm = torch.ones(HIDDEN, dtype=dtype)
        layers = [
            DecoderLayer(
                input_norm=norm,
                mlp_norm=norm,
                qkv=matrix((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN),
                out=matrix(HIDDEN, HEADS * HEAD),
                gate_up=matrix(2 * INNER, HIDDEN),
                down=matrix(HIDDEN, INNER),
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_size=HEAD,
                intermediate_size=INNER,
                activation="silu",
                scale=HEAD**-0.5,
                rope_table=0,
                rotary_dim=HEAD,
            )
            for _ in range(LAYERS)
        ]
        self.dtype = dtype
        self.stack = DecoderStack(layers, hidden_size=HIDDEN, epsilon=1e-5, final_norm=norm)
        self.table = matrix(VOCAB, HIDDEN).packed
        angles = torch.arange(8192)[:, None] / 1e4 ** (torch.arange(0, HEAD, 2) / HEAD)
        self.rope = torch.cat((angles.cos(), angles.sin()), 1)


class Step:
    """One step of a workload, ready to run again and again."""

    def __init__(self, model: Model, load: Workload) -> None:
        self.model = model
        total = load.cached + load.new
        blocks = -(-total // BLOCK_TOKENS)
        field_bytes = BLOCK_TOKENS * KV_HEADS * HEAD * model.dtype.itemsize
        block_units = LAYERS * 2 * field_bytes // UNIT_BYTES
        num_units = load.num_rows * blocks * block_units
        arena = allocate_arena((num_units + block_units) * UNIT_BYTES, torch.device("cpu"))
        arena.view(model.dtype).normal_()
        self.caches = [
            arena.view(model.dtype).as_strided(
                (num_units, BLOCK_TOKENS, KV_HEADS, HEAD),
                (UNIT_BYTES // model.dtype.itemsize, KV_HEADS * HEAD, HEAD, 1),
                i * field_bytes // model.dtype.itemsize,
            )
            for i in range(2 * LAYERS)
        ]
        self.offsets = (torch.randperm(load.num_rows * blocks) * block_units).int()
        self.offsets = self.offsets.view(load.num_rows, blocks)
        self.positions = torch.arange(load.cached, total).repeat(load.num_rows)
        offsets = self.offsets[:, self.positions[: load.new] // BLOCK_TOKENS].flatten()
        self.slots = torch.stack((offsets, (self.positions % BLOCK_TOKENS).int()), 1)
        self.ids = torch.randint(0, VOCAB, self.positions.shape)
        self.cu_query_lens = (torch.arange(load.num_rows + 1) * load.new).int()
        self.seq_lens = torch.full((load.num_rows,), total).int()
        self.last = self.cu_query_lens[1:].long() - 1

    def run(self) -> Tensor:
        """Return the next token of each row."""
        model = self.model
        hidden = torch.empty(self.ids.shape[0], HIDDEN, dtype=model.dtype)
        embedding(hidden, self.ids, model.table)
        decoder_layers(
            hidden,
            model.stack,
            self.positions,
            self.cu_query_lens,
            self.seq_lens,
            [self.offsets],
            [self.slots],
            self.caches[0::2],
            self.caches[1::2],
            [0] * LAYERS,
            [model.rope],
        )
        hidden = hidden[self.last]
        logits = torch.empty(hidden.shape[0], VOCAB)
        linear(logits, hidden, model.table)
        tokens = torch.empty(hidden.shape[0], dtype=torch.int64)
        argmax(tokens, logits)
        return tokens


def measure(step: Step, seconds: float) -> tuple[float, float, int]:
    """Return the least and the median time of a step in milliseconds, and the number of runs."""
    step.run()
    times_ms: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times_ms) < 3:
        start = time.perf_counter()
        step.run()
        times_ms.append((time.perf_counter() - start) * 1e3)
    return min(times_ms), statistics.median(times_ms), len(times_ms)


@torch.inference_mode()
def main() -> None:
    """Print one JSON line for each workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each workload")
    parser.add_argument("--only", default="", help="part of a workload's name")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model(getattr(torch, args.dtype))
    for load in WORKLOADS:
        if args.only not in load.name:
            continue
        least_ms, median_ms, runs = measure(Step(model, load), args.seconds)
        tokens = load.num_rows * load.new
        print(
            json.dumps(
                {
                    "workload": load.name,
                    "isa": cpu_isa(),
                    "dtype": args.dtype,
                    "threads": torch.get_num_threads(),
                    "least_ms": round(least_ms, 3),
                    "median_ms": round(median_ms, 3),
                    "tokens_per_s": round(tokens / least_ms * 1e3, 1),
                    "runs": runs,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
