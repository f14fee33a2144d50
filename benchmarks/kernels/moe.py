"""Mixtures of two models on a GPU: times, and their shares of what the machine can do.

Run by hand on a GPU (`python -m benchmarks.kernels.moe`). A step of few tokens is bound by reading
the chosen experts' weights, one of many by its products. Prints a JSON line for each model, number
of tokens and form, for pairs taken one by one (where that is possible) and sorted by expert.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.graph_timer import count_copies, measure_copy_bytes_per_s, measure_us
from vllm._custom_ops.triton import moe
from vllm._custom_ops.triton.moe_grouped import choose_tile, multiply_grouped
from vllm._custom_ops.triton.moe_product import Product, sum_choices
from vllm._custom_ops.triton.moe_routing import sort_pairs
from vllm._custom_ops.triton.moe_single import Strip, choose_strip
from vllm._custom_ops.triton.moe_tile import Tile

TOKENS = (1, 2, 4, 8, 64, 512, 2048, 8192, 16384)
MOST_SINGLE_PAIRS = 64
MANY_TOKENS = 256


def _tile(
    m: int,
    n: int,
    k: int,
    warps: int,
    stages: int,
    *,
    described: bool = True,
    small: int = 0,
) -> Tile:
    return Tile(
        block_m=m,
        block_n=n,
        block_k=k,
        num_warps=warps,
        num_stages=stages,
        has_descriptors=described,
        small_m=small,
    )


STRIPS = {
    "tile 16x256": Strip(block_n=16, block_k=256, num_warps=4, num_stages=4),
    "tile 32x128": Strip(block_n=32, block_k=128, num_warps=4, num_stages=4),
    "tile 32x256": Strip(block_n=32, block_k=256, num_warps=4, num_stages=4),
    "tile 64x128": Strip(block_n=64, block_k=128, num_warps=4, num_stages=4),
}
FEW_TILES = {
    "16x64x128": _tile(16, 64, 128, 4, 4, described=False),
    "16x128x128 tma": _tile(16, 128, 128, 4, 3),
    "32x64x128": _tile(32, 64, 128, 4, 4, described=False),
    "64x128x64 tma": _tile(64, 128, 64, 4, 4),
    "64x128x64 small": _tile(64, 128, 64, 4, 4, described=False, small=16),
    "64x128x64 tma small": _tile(64, 128, 64, 4, 4, small=16),
}
MANY_TILES = {
    "64x128x64 w4 s4": _tile(64, 128, 64, 4, 4, described=False),
    "64x128x64 w4 s4 tma small": _tile(64, 128, 64, 4, 4, small=16),
    "128x128x64 w8 s3": _tile(128, 128, 64, 8, 3, described=False),
    "128x256x64 w8 s3": _tile(128, 256, 64, 8, 3, described=False),
    "128x256x64 w8 s3 tma": _tile(128, 256, 64, 8, 3),
    "128x256x64 w8 s3 tma small": _tile(128, 256, 64, 8, 3, small=64),
    "128x256x64 w8 s4 tma": _tile(128, 256, 64, 8, 4),
    "128x256x64 w8 s4 tma small": _tile(128, 256, 64, 8, 4, small=64),
    "128x128x64 w8 s3 small": _tile(128, 128, 64, 8, 3, described=False, small=64),
}


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


def list_forms(num_tokens: int, num_chosen: int) -> dict[str, Strip | Tile]:
    """Return the forms that are measured for so many tokens."""
    if num_tokens >= MANY_TOKENS:
        return dict(MANY_TILES)
    forms: dict[str, Strip | Tile] = {**FEW_TILES}
    if num_tokens * num_chosen <= MOST_SINGLE_PAIRS:
        forms.update(STRIPS)
    return forms


def bind_layer(
    products: tuple[Product, Product],
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    form: Strip | Tile,
) -> Callable[[], object]:
    """Return a call that runs a layer in one form."""
    out = torch.empty_like(x)
    if isinstance(form, Strip):
        return partial(moe.run_single, out, x, *products, weights, ids, form)
    return partial(moe.run_grouped, out, x, *products, weights, ids, form)


def measure_parts(
    products: tuple[Product, Product], x: Tensor, weights: Tensor, ids: Tensor, tile: Tile
) -> dict[str, float]:
    """Return the times of what a layer of sorted pairs consists of."""
    inner, outer = products
    num_experts, num_chosen = inner.weight.shape[0], ids.shape[1]
    routing = sort_pairs(ids, num_experts, tile.block_m)
    given = num_chosen, routing, tile
    hidden = multiply_grouped(inner, x, *given, is_first=True)
    parts = multiply_grouped(outer, hidden, *given, is_first=False)
    calls: dict[str, Callable[[], object]] = {
        "sort_us": partial(sort_pairs, ids, num_experts, tile.block_m),
        "first_us": partial(multiply_grouped, inner, x, *given, is_first=True),
        "second_us": partial(multiply_grouped, outer, hidden, *given, is_first=False),
        "sum_us": partial(sum_choices, torch.empty_like(x), parts, weights, ids, num_experts),
    }
    return {name: round(measure_us([call]), 1) for name, call in calls.items()}


def report(
    mixture: Mixture, products: list[tuple[Product, Product]], num_tokens: int, copy_rate: float
) -> None:
    """Print the times of one number of tokens."""
    x = torch.randn(num_tokens, mixture.hidden, dtype=torch.bfloat16, device="cuda")
    scores = torch.rand(num_tokens, mixture.num_experts, device="cuda")
    weights, ids = scores.topk(mixture.num_chosen, dim=-1)
    ids = ids.int()
    num_elements = 3 * mixture.hidden * mixture.inner
    least_us = ids.unique().numel() * num_elements * 2 / copy_rate * 1e6
    chosen = (choose_strip(), choose_tile(x, ids.numel() / mixture.num_experts))
    for name, form in list_forms(num_tokens, mixture.num_chosen).items():
        time_us = measure_us([bind_layer(p, x, weights, ids, form) for p in products])
        line = {
            "model": mixture.name,
            "tokens": num_tokens,
            "form": name,
            "is_chosen": form in chosen,
            "us": round(time_us, 1),
            "share_of_copy": round(least_us / time_us, 3),
            "tflops": round(2 * ids.numel() * num_elements / time_us / 1e6, 1),
        }
        if isinstance(form, Tile) and num_tokens >= MANY_TOKENS:
            line |= measure_parts(products[0], x, weights, ids, form)
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
