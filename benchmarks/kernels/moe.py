"""Mixtures of two models on a GPU: times, and their shares of what the machine can do.

Run by hand on a GPU (`python -m benchmarks.kernels.moe`). A step of few tokens is bound by reading
the chosen experts' weights, one of many by its products. Prints a JSON line for each model and
number of tokens, for pairs taken one by one (where that is possible) and sorted by expert.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.graph_timer import count_copies, measure_copy_bytes_per_s, measure_us
from vllm._custom_ops.triton import moe
from vllm._custom_ops.triton.moe_product import Product, choose_tile

TOKENS = (1, 8, 64, 8192)
MOST_SINGLE_PAIRS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Sizes of one layer."""

    name: str
    num_experts: int
    num_chosen: int
    hidden: int
    inner: int


MIXTURES = (
    Mixture(name="qwen3-next-small", num_experts=64, num_chosen=8, hidden=2048, inner=512),
    Mixture(name="deepseek-v2-lite", num_experts=64, num_chosen=6, hidden=2048, inner=1408),
)


def make_products(mixture: Mixture, copies: int) -> list[tuple[Product, Product]]:
    """Return random experts, as many copies as no cache holds."""
    products = []
    for _ in range(copies):
        sizes = mixture.num_experts, 2 * mixture.inner, mixture.hidden
        first = torch.randn(*sizes, dtype=torch.bfloat16, device="cuda") * 0.02
        sizes = mixture.num_experts, mixture.hidden, mixture.inner
        second = torch.randn(*sizes, dtype=torch.bfloat16, device="cuda") * 0.02
        inner = Product(
            weight=first,
            bias=None,
            num_outputs=mixture.inner,
            up_offset=mixture.inner,
            activation="silu",
        )
        products.append((inner, Product(weight=second, bias=None, num_outputs=mixture.hidden)))
    return products


def measure_form_us(
    products: list[tuple[Product, Product]], x: Tensor, weights: Tensor, ids: Tensor, form: str
) -> float:
    """Return the time of a layer whose pairs are taken "single" or "grouped"."""
    limit = moe.MAX_SINGLE_PAIRS
    moe.MAX_SINGLE_PAIRS = 0 if form == "grouped" else MOST_SINGLE_PAIRS
    out = torch.empty_like(x)
    try:
        return measure_us([partial(moe.run_part, out, x, *p, weights, ids) for p in products])
    finally:
        moe.MAX_SINGLE_PAIRS = limit


def report(
    mixture: Mixture, products: list[tuple[Product, Product]], num_tokens: int, copy_rate: float
) -> None:
    """Print the times of one number of tokens."""
    num_pairs = num_tokens * mixture.num_chosen
    x = torch.randn(num_tokens, mixture.hidden, dtype=torch.bfloat16, device="cuda")
    scores = torch.rand(num_tokens, mixture.num_experts, device="cuda")
    weights, ids = scores.topk(mixture.num_chosen, dim=-1)
    ids = ids.int()
    num_elements = 3 * mixture.hidden * mixture.inner
    least_us = ids.unique().numel() * num_elements * 2 / copy_rate * 1e6
    for form in ("single", "grouped"):
        if form == "single" and num_pairs > MOST_SINGLE_PAIRS:
            continue
        time_us = measure_form_us(products, x, weights, ids, form)
        line = {
            "model": mixture.name,
            "tokens": num_tokens,
            "form": form,
            "block_m": choose_tile(num_pairs / mixture.num_experts).block_m,
            "us": round(time_us, 1),
            "share_of_copy": round(least_us / time_us, 3),
            "tflops": round(2 * num_pairs * num_elements / time_us / 1e6, 1),
        }
        print(json.dumps(line), flush=True)


@torch.inference_mode()
def main() -> None:
    """Print a JSON line for each model, number of tokens and form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    args = parser.parse_args()
    copy_rate = measure_copy_bytes_per_s()
    print(json.dumps({"copy_tb_per_s": round(copy_rate / 1e12, 3)}), flush=True)
    for mixture in MIXTURES:
        chosen_bytes = mixture.num_chosen * 3 * mixture.hidden * mixture.inner * 2
        products = make_products(mixture, count_copies(chosen_bytes))
        for num_tokens in args.tokens:
            report(mixture, products, num_tokens, copy_rate)


if __name__ == "__main__":
    main()
