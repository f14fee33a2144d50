"""Record what transformers answers from a GGUF file, as data for the tests.

    python tools/record_greedy.py smollm2 tests/data/smollm2_long.json
    python tools/record_greedy.py gemma3 tests/data/gemma3_windows.json --starts 0 300 600 \\
        --lengths 1500 --tokens 64

Prompts are pieces of this project's licence (by default ten beginnings of 60 to 900 tokens),
continued greedily in float32 from the dequantised weights. Beside each id stands the distance
between the two best logits: where it is tiny, another order of summation may choose the other one.
Needs `accelerate`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import real_models  # noqa: E402 - a script finds the tree by its own place

LENGTHS = (60, 150, 250, 350, 450, 550, 650, 750, 850, 900)


def load(path: Path) -> tuple[Any, Any]:
    """Return the dequantised model and its tokenizer."""
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    quantization = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=quantization
    )
    return model.eval(), tokenizer


@torch.inference_mode()
def continue_greedily(model: Any, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
    """Return the greedy ids and the distance of the two best logits at each."""
    ids, gaps, cache, step = [], [], None, torch.tensor([prompt_ids])
    for _ in range(num_tokens):
        output = model(step, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best = output.logits[0, -1].topk(2)
        ids.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 5))
        step = torch.tensor([[ids[-1]]])
    return {"prompt_ids": prompt_ids, "ids": ids, "gaps": gaps}


def main() -> None:
    """Record one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=("smollm2", "gemma3"))
    parser.add_argument("target", type=Path)
    parser.add_argument("--starts", type=int, nargs="+", default=[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    finders = {"smollm2": real_models.find_smollm2, "gemma3": real_models.find_gemma3}
    path = finders[args.model]()
    if path is None:
        sys.exit("the model is missing: make models")
    model, tokenizer = load(path)
    text = (ROOT / "LICENSE").read_text()
    all_ids = tokenizer(text)["input_ids"]
    record = {
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "prompts": [
            continue_greedily(model, all_ids[start : start + length], args.tokens)
            for start in args.starts
            for length in args.lengths
        ],
    }
    args.target.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
