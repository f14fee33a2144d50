"""One rank of a tensor-parallel run, started as a process by `test_tensor_parallel.py`.

Reads checkpoints (config.json normalised, model.safetensors) that the test has written, generates
greedily on all ranks, and writes what this rank got.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.models.compare import make_prompts
from tests.models.families import load_ours
from tests.utils.paged_driver import PagedDriver
from vllm.distributed.parallel_state import TensorParallel

PROMPT_LENGTHS = (1, 17, 60)
NUM_TOKENS = 16


def main(directory: Path, rank: int, size: int, kernel: str) -> None:
    """Run every checkpoint under `directory` and save the outputs to rank<rank>.pt."""
    torch.set_num_threads(1)
    tp = TensorParallel.connect(rank, size, f"file://{directory}/rendezvous", timeout_s=120)
    results = {}
    for path in sorted(directory.glob("*/engine_config.json")):
        config = json.loads(path.read_text())
        weights = load_file(path.parent / "model.safetensors")
        for dtype in (torch.float32, torch.bfloat16):
            model = load_ours(config, weights, dtype=dtype, tp=tp)
            driver = PagedDriver(model, kernel=kernel)
            made = driver.generate(make_prompts(PROMPT_LENGTHS), NUM_TOKENS, chunk_tokens=32)
            results[path.parent.name, dtype] = [(m.token_ids, torch.stack(m.logits)) for m in made]
    torch.save(results, directory / f"rank{rank}.pt")
    tp.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
