"""Sums over the GPUs of one host: our kernel beside NCCL, in CUDA graphs, by size.

    python benchmarks/kernels/all_reduce.py --ranks 2 --output-json FILE

Prints a line for each number of bytes with the microseconds of a sum out of graphs of twenty.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels.graph_timer import measure_us
from benchmarks.machine import describe_machine, describe_versions
from vllm.distributed.parallel_state import TensorParallel

SIZES = tuple(1 << n for n in range(10, 21))
ROUNDS = 3


def run_rank(rank: int, size: int, folder: str, output: str) -> None:
    """Measure on one rank; the first writes what it found."""
    torch.cuda.set_device(rank)
    ours = TensorParallel.connect(rank, size, f"file://{folder}/rendezvous", "cuda")
    sums = ours._short_sums
    if sums is None:
        raise SystemExit("these GPUs do not reach each other's memory")
    library = TensorParallel(rank, size, torch.distributed.group.WORLD)
    rows = []
    for num_bytes in SIZES:
        x = torch.randn(num_bytes // 2, device=torch.device("cuda", rank)).bfloat16()
        times_us: dict[str, list[float]] = {"ours": [], "nccl": []}
        for _ in range(ROUNDS):
            times_us["ours"].append(measure_us([partial(sums.sum, x)]))
            times_us["nccl"].append(measure_us([partial(library.all_reduce, x)]))
        row = {"bytes": num_bytes, **{k: round(min(v), 2) for k, v in times_us.items()}}
        rows.append(row)
        if rank == 0:
            print(row, flush=True)
    if rank == 0:
        report = {
            "what": f"microseconds of a sum of bfloat16 over {size} GPUs, best of {ROUNDS} medians",
            "machine": describe_machine(),
            "versions": describe_versions(),
            "command": " ".join(["python", "benchmarks/kernels/all_reduce.py", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
            "rows": rows,
        }
        Path(output).write_text(json.dumps(report, indent=1) + "\n")
    ours.close()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    default = Path(__file__).resolve().parents[1] / "results" / "all_reduce.json"
    parser.add_argument("--output-json", type=Path, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (args.ranks, folder, str(args.output_json)), nprocs=args.ranks)


if __name__ == "__main__":
    main()
