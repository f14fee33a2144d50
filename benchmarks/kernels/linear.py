"""Products of few rows with weights of known models: our kernel in several forms beside torch's.

Run by hand on a GPU (`python -m benchmarks.kernels.linear`), under a minute with the compilation.
Prints a JSON line for each shape and number of rows: the time of torch's product and of our best
form, their shares of the copy bandwidth, and that form, a row of
`vllm/_custom_ops/triton/linear_table.py`; and the time of what leaves parts or streams its weights,
where a table says so. Torch's time of a gated product has no activation in it. Our kernels overlap
with each other here; `chain.py` beside it has what stands between them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.graph_timer import count_copies, measure_copy_bytes_per_s, measure_us
from vllm._custom_ops.triton.device import count_processors
from vllm._custom_ops.triton.linear import (
    launch_skinny,
    skinny_gated_linear,
    skinny_linear_parts,
)
from vllm._custom_ops.triton.linear_table import SkinnyConfig, count_parts
from vllm._custom_ops.triton.stream_table import choose_gated_tile

ROWS = (1, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A weight [n, k], its gate and up rows joined by an activation or none."""

    name: str
    n: int
    k: int
    activation: str = ""

    @property
    def num_outputs(self) -> int:
        """Elements of a result row."""
        return self.n // 2 if self.activation else self.n


SHAPES = (
    Shape(name="qwen2.qkv", n=4608, k=3584),
    Shape(name="qwen2.o", n=3584, k=3584),
    Shape(name="qwen2.gate_up", n=37888, k=3584, activation="silu"),
    Shape(name="qwen2.down", n=3584, k=18944),
    Shape(name="qwen2.lm_head", n=152064, k=3584),
    Shape(name="nemotron.in", n=18560, k=4096),
    Shape(name="nemotron.out", n=4096, k=8192),
    Shape(name="nemotron.up", n=21504, k=4096),
    Shape(name="nemotron.down", n=4096, k=21504),
    Shape(name="nemotron.qkv", n=6144, k=4096),
    Shape(name="gemma.qkv", n=4096, k=2560),
    Shape(name="gemma.o", n=2560, k=2048),
    Shape(name="gemma.gate_up", n=20480, k=2560, activation="gelu_tanh"),
    Shape(name="gemma.down", n=2560, k=10240),
    Shape(name="qwen3-next.qkvz", n=12288, k=2048),
    Shape(name="qwen3-next.ba", n=64, k=2048),
    Shape(name="qwen3-next.out", n=2048, k=4096),
    Shape(name="qwen3-next.qkv", n=9216, k=2048),
    Shape(name="qwen3-next.shared", n=1024, k=2048, activation="silu"),
    Shape(name="qwen3-next.shared_down", n=2048, k=512),
    Shape(name="deepseek.q", n=3072, k=2048),
    Shape(name="deepseek.kv_a", n=576, k=2048),
    Shape(name="deepseek.o", n=2048, k=2048),
    Shape(name="deepseek.shared", n=5632, k=2048, activation="silu"),
    Shape(name="deepseek.shared_down", n=2048, k=2816),
)


def _vector(block_n: int, block_k: int, stages: int, programs: int) -> SkinnyConfig:
    return SkinnyConfig(
        block_n=block_n,
        block_k=block_k,
        num_stages=stages,
        programs_per_sm=programs,
        is_vector=True,
    )


def _dot(
    block_n: int, block_k: int, stages: int, programs: int, *, is_swapped: bool = False
) -> SkinnyConfig:
    return SkinnyConfig(
        block_n=block_n,
        block_k=block_k,
        num_stages=stages,
        programs_per_sm=programs,
        is_swapped=is_swapped,
    )


VECTORS = (
    _vector(8, 512, 1, 4),
    _vector(8, 512, 1, 8),
    _vector(16, 512, 1, 4),
    _vector(8, 1024, 1, 6),
    _vector(16, 256, 1, 7),
)
DOTS = (
    _dot(32, 128, 5, 4),
    _dot(32, 256, 4, 3),
    _dot(64, 128, 4, 2),
    _dot(64, 64, 6, 4),
    _dot(128, 64, 4, 2),
    _dot(64, 128, 4, 1, is_swapped=True),
    _dot(64, 128, 4, 2, is_swapped=True),
    _dot(64, 256, 3, 1, is_swapped=True),
    _dot(64, 64, 5, 4, is_swapped=True),
)


def list_configs(num_rows: int) -> Iterator[SkinnyConfig]:
    """Yield the forms that are worth a try for so many rows."""
    if num_rows == 1:
        yield from VECTORS
    for config in DOTS:
        if num_rows <= 16 or (config.block_n > 32 and not (num_rows > 32 and config.block_k > 128)):
            yield config


class Bench:
    """The weights of one shape, as many copies as no cache holds."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        copies = count_copies(shape.n * shape.k * 2)
        self.weights = torch.randn(
            copies, shape.n, shape.k, dtype=torch.bfloat16, device="cuda"
        ).unbind()

    def make_rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return memory for results, and inputs."""
        x = torch.randn(num_rows, self.shape.k, dtype=torch.bfloat16, device="cuda")
        return x.new_empty(num_rows, self.shape.num_outputs), x

    def measure_ours_us(self, num_rows: int, config: SkinnyConfig) -> float:
        """Return the time of our kernel."""
        out, x = self.make_rows(num_rows)
        act = self.shape.activation
        return measure_us([partial(launch_skinny, out, x, w, None, act, config)
                           for w in self.weights])  # fmt: skip

    def measure_streamed_us(self, num_rows: int) -> float | None:
        """Return the time of the op that may stream its weights, None where it does not."""
        out, x = self.make_rows(num_rows)
        act, sizes = self.shape.activation, (num_rows, self.shape.num_outputs, self.shape.k)
        if act:
            if choose_gated_tile(*sizes[1:], count_processors(x.device)) is None:
                return None
            return measure_us([partial(skinny_gated_linear, out, x, w, None, act)
                               for w in self.weights])  # fmt: skip
        num_parts = count_parts(*sizes, x.device)
        if num_parts == 0:
            return None
        parts = x.new_empty(num_parts, *out.shape, dtype=torch.float32)
        return measure_us([partial(skinny_linear_parts, parts, x, w) for w in self.weights])

    def measure_torch_us(self, num_rows: int) -> float:
        """Return the time of torch's product."""
        _, x = self.make_rows(num_rows)
        return measure_us([partial(F.linear, x, w) for w in self.weights])


def compile_form(shape: Shape, num_rows: int, config: SkinnyConfig) -> str:
    """Run a form once on whatever memory holds; return why it cannot run, or nothing."""
    x = torch.empty(num_rows, shape.k, dtype=torch.bfloat16, device="cuda")
    weight = torch.empty(shape.n, shape.k, dtype=torch.bfloat16, device="cuda")
    try:
        launch_skinny(
            x.new_empty(num_rows, shape.num_outputs), x, weight, None, shape.activation, config
        )
        torch.cuda.synchronize()
    except Exception as error:  # a form that does not fit this GPU is left out
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def find_bucket(num_rows: int) -> int:
    """Return how many rows the kernel that multiplies `num_rows` is compiled for."""
    return 1 if num_rows == 1 else max(16, 1 << (num_rows - 1).bit_length())


Broken = set[tuple[str, int, SkinnyConfig]]
"""Shape, bucket and form of what cannot run on this GPU."""


def compile_all(shapes: list[Shape], rows: list[int]) -> Broken:
    """Compile side by side and return what cannot run here."""
    buckets = {find_bucket(num_rows): num_rows for num_rows in rows}
    jobs = [(s, r, c) for s in shapes for r in buckets.values() for c in list_configs(r)]
    compile_form(*jobs[0])  # starts CUDA and makes the counters before the threads do
    with ThreadPoolExecutor(8) as pool:
        results = list(zip(jobs, pool.map(lambda job: compile_form(*job), jobs), strict=True))
    for (shape, num_rows, config), why in results:
        if why:
            print(f"{shape.name}, {num_rows} rows, {config}: {why}", file=sys.stderr)
    return {
        (shape.name, find_bucket(rows), config) for (shape, rows, config), why in results if why
    }


def report(bench: Bench, num_rows: int, broken: Broken, copy_rate: float) -> None:
    """Measure one shape and number of rows and print what is best."""
    shape = bench.shape
    least_us = shape.n * shape.k * 2 / copy_rate * 1e6
    times = {
        config: bench.measure_ours_us(num_rows, config)
        for config in list_configs(num_rows)
        if (shape.name, find_bucket(num_rows), config) not in broken
    }
    for config, time_us in times.items():
        fields = dataclasses.astuple(config)
        print(f"{shape.name:22} {num_rows:3} {time_us:8.1f} us {fields}", file=sys.stderr)
    best = min(times, key=lambda config: times[config])
    torch_us, streamed_us = bench.measure_torch_us(num_rows), bench.measure_streamed_us(num_rows)
    line = {
        "shape": shape.name,
        "rows": num_rows,
        "torch_us": round(torch_us, 2),
        "torch_share": round(least_us / torch_us, 3),
        "best_us": round(times[best], 2),
        "best_share": round(least_us / times[best], 3),
        "streamed_us": None if streamed_us is None else round(streamed_us, 2),
        "config": dataclasses.asdict(best),
    }
    print(json.dumps(line), flush=True)


@torch.inference_mode()
def main() -> None:
    """Print a JSON line for each shape and number of rows; every form's time goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--shapes", nargs="*", default=[""], help="what their names begin with")
    args = parser.parse_args()
    shapes = [shape for shape in SHAPES if shape.name.startswith(tuple(args.shapes))]
    copy_rate = measure_copy_bytes_per_s()
    print(json.dumps({"copy_tb_per_s": round(copy_rate / 1e12, 3)}), flush=True)
    broken = compile_all(shapes, args.rows)
    for shape in shapes:
        bench = Bench(shape)
        for num_rows in args.rows:
            report(bench, num_rows, broken, copy_rate)
        del bench


if __name__ == "__main__":
    main()
