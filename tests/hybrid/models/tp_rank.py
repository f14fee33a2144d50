"""One rank of a tensor-parallel run, started as a process by `test_tensor_parallel.py`.

Reads the checkpoints that the test has written, generates greedily on all ranks, and writes what
this rank got.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.models.compare import make_prompts
from tests.models.families import load_ours
from tests.utils.paged_driver import PagedDriver
from vllm.distributed.parallel_state import TensorParallel
from vllm.transformers_utils.config import get_config

PROMPT_LENGTHS = (1, 17, 60)
NUM_TOKENS = 8


def main(directory: Path, rank: int, size: int) -> None:
    """Run every checkpoint under `directory` and save the outputs to rank<rank>.pt."""
    torch.set_num_threads(1)
    tp = TensorParallel.connect(rank, size, f"file://{directory}/rendezvous", timeout_s=120)
    results = {}
    for path in sorted(directory.glob("*/model.safetensors")):
        config, weights = get_config(str(path.parent)), load_file(path)
        for dtype in (torch.float32, torch.bfloat16):
            model = load_ours(config, weights, dtype=dtype, tp=tp)
            driver = PagedDriver(model, kernel="cpu")
            made = driver.generate(make_prompts(PROMPT_LENGTHS), NUM_TOKENS, chunk_tokens=32)
            token_bytes = [spec.token_bytes for spec in model.cache_specs()]
            results[path.parent.name, dtype] = (
                [(m.token_ids, torch.stack(m.logits)) for m in made],
                token_bytes,
            )
    torch.save(results, directory / f"rank{rank}.pt")
    tp.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
