"""The kernels of one decoder layer of Qwen2-7B in a decode step, one after the other.

Run by hand on a GPU (`python -m benchmarks.kernels.chain`), half a minute with the compilation. A
kernel alone says nothing of what it costs between its neighbours: where kernels overlap
(`vllm/_custom_ops/triton/overlap.py`), it is on its way in while the one before it ends. Prints a
JSON line for each number of rows and variant: microseconds a layer, in a graph of 20 layers with
cold weights, and the share of the copy bandwidth that reading the weights makes of it. With names,
only the variants that begin with one of them are measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.attention import QWEN, make_decode_args
from benchmarks.kernels.graph_timer import measure_copy_bytes_per_s, measure_us
from vllm._custom_ops.fused_qkv import qkv_norm_rope_cache
from vllm._custom_ops.norm import add_parts_rms_norm, fused_add_rms_norm
from vllm._custom_ops.triton import attention_decode, linear
from vllm._custom_ops.triton.attention_args import AttentionArgs
from vllm._custom_ops.triton.device import has_warp_group_products
from vllm._custom_ops.triton.linear_table import SkinnyConfig, choose_config, count_parts

HIDDEN, INNER, SEQ_LEN, EPSILON = 3584, 18944, 640, 1e-6
NUM_LAYERS = 4
Q_SIZE = QWEN.num_heads * QWEN.head_size
QKV_SIZE = Q_SIZE + 2 * QWEN.num_kv_heads * QWEN.head_size
SIZES = {
    "qkv": (QKV_SIZE, HIDDEN),
    "o": (HIDDEN, Q_SIZE),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
LAYER_BYTES = 2 * sum(n * k for n, k in SIZES.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How a layer is computed.

    Attributes:
        overlaps: whether Triton's kernels overlap; the others do where they can.
        leaves_parts: whether products are those that a model's layers call: parts are left where
            the table says so, and what runs on Hopper alone may run.
        of_torch: products that are torch's.
        forms: forms of products other than the table's.
    """

    name: str
    overlaps: bool = True
    leaves_parts: bool = False
    of_torch: tuple[str, ...] = ()
    forms: dict[str, SkinnyConfig] = field(default_factory=dict)


SPLIT = SkinnyConfig(block_n=64, block_k=128, num_stages=4, programs_per_sm=2)
STREAM = replace(SPLIT, is_swapped=True)
VECTOR = SkinnyConfig(block_n=8, block_k=512, num_stages=1, programs_per_sm=7, is_vector=True)
LIGHT = SkinnyConfig(block_n=64, block_k=64, num_stages=4, programs_per_sm=3, is_swapped=True)
SHORT = SkinnyConfig(block_n=32, block_k=128, num_stages=5, programs_per_sm=4)

VARIANTS = (
    Variant(name="apart, torch's qkv", overlaps=False, of_torch=("qkv",)),
    Variant(name="apart", overlaps=False),
    Variant(name="overlap, torch's qkv", of_torch=("qkv",)),
    Variant(name="overlap"),
    Variant(name="parts", leaves_parts=True),
    Variant(name="overlap, split", forms=dict.fromkeys(("qkv", "o", "down"), SPLIT)),
    Variant(name="overlap, stream", forms=dict.fromkeys(("qkv", "o", "down"), STREAM)),
    Variant(name="overlap, light gate", forms={"gate_up": LIGHT}),
    Variant(name="overlap, short gate", forms={"gate_up": SHORT}),
    Variant(name="overlap, vectors", forms=dict.fromkeys(("qkv", "o", "down"), VECTOR)),
)


class Layer:
    """One layer's weights and cache, and memory for results and parts that all layers share."""

    def __init__(
        self, attention: AttentionArgs, shared: dict[str, Tensor], parts: dict[str, Tensor]
    ) -> None:
        self.weights = {
            name: torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * k**-0.5
            for name, (n, k) in SIZES.items()
        }
        self.bias = torch.zeros(QKV_SIZE, dtype=torch.bfloat16, device="cuda")
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.shared = shared
        self.parts = parts
        num_rows = shared["x"].shape[0]
        heads = (num_rows, QWEN.num_heads, QWEN.head_size)
        self.attention = replace(
            attention,
            query=shared["qkv"][:, :Q_SIZE].unflatten(1, heads[1:]),
            out=shared["attended"].view(heads),
        )
        assert attention.block_offsets is not None
        last = SEQ_LEN - 1
        block = attention.block_offsets[:, last // 16]
        self.slots = torch.stack((block, torch.full_like(block, last % 16)), 1)
        self.positions = torch.full((num_rows,), last, device="cuda")

    def find_parts(self, name: str, variant: Variant) -> Tensor | None:
        """Return memory for the parts of a product, None where it leaves none."""
        x = self.shared["x"]
        num_parts = count_parts(x.shape[0], *SIZES[name], x.device)
        if not (variant.leaves_parts and num_parts):
            return None
        if name not in self.parts:
            shape = num_parts, x.shape[0], SIZES[name][0]
            self.parts[name] = x.new_zeros(shape, dtype=torch.float32)
        return self.parts[name]

    def multiply(self, name: str, out: Tensor, x: Tensor, variant: Variant) -> Tensor | None:
        """Write one product, or return its parts."""
        weight, bias = self.weights[name], self.bias if name == "qkv" else None
        if variant.leaves_parts and name == "gate_up":
            linear.skinny_gated_linear(out, x, weight, None, "silu")
            return None
        parts = self.find_parts(name, variant)
        if parts is not None:
            linear.skinny_linear_parts(parts, x, weight)
            return parts
        if name in variant.of_torch:
            F.linear(x, weight, bias)  # as in a model, its result is a new tensor; not used here
            return None
        is_gated = name == "gate_up"
        form = variant.forms.get(name)
        form = form or choose_config(
            x.shape[0],
            out.shape[1],
            x.shape[1],
            is_gated=is_gated,
            has_warp_groups=has_warp_group_products(x.device),
        )
        linear.launch_skinny(out, x, weight, bias, "silu" if is_gated else "", form)
        return None

    def add_and_norm(self, parts: Tensor | None) -> None:
        """Add x, or its parts, to the residual stream; x becomes the norm of that."""
        s = self.shared
        if parts is None:
            fused_add_rms_norm(s["x"], s["residual"], self.norm, EPSILON)
        else:
            add_parts_rms_norm(s["x"], parts, s["residual"], self.norm, EPSILON)

    def run(self, variant: Variant) -> None:
        """Compute the layer once; the parts of its last product are the next one's."""
        s = self.shared
        self.add_and_norm(self.find_parts("down", variant))
        qkv_parts = self.multiply("qkv", s["qkv"], s["x"], variant)
        key, value = self.attention.key_cache, self.attention.value_cache
        assert key is not None and value is not None
        qkv_norm_rope_cache(
            s["qkv"], self.positions, self.slots, key, value, None, None, EPSILON, s["cos_sin"],
            QWEN.num_heads, QWEN.num_kv_heads, QWEN.head_size, QWEN.head_size, True,
            qkv_parts, None if qkv_parts is None else self.bias,
        )  # fmt: skip
        attention_decode.decode_attention(self.attention, s["x"].shape[0], SEQ_LEN)
        self.add_and_norm(self.multiply("o", s["x"], s["attended"], variant))
        self.multiply("gate_up", s["inner"], s["x"], variant)
        self.multiply("down", s["x"], s["inner"], variant)


def make_layers(num_rows: int) -> list[Layer]:
    """Return layers whose weights no cache holds."""
    sizes = {"x": HIDDEN, "residual": HIDDEN, "qkv": QKV_SIZE, "attended": Q_SIZE, "inner": INNER}
    shared = {
        name: torch.randn(num_rows, size, dtype=torch.bfloat16, device="cuda")
        for name, size in sizes.items()
    }
    shared["cos_sin"] = torch.randn(SEQ_LEN, QWEN.head_size, device="cuda")
    caches = make_decode_args(QWEN, num_rows, SEQ_LEN)[:NUM_LAYERS]
    parts: dict[str, Tensor] = {}
    return [Layer(caches[layer % len(caches)], shared, parts) for layer in range(NUM_LAYERS)]


def measure(layers: list[Layer], variant: Variant) -> float:
    """Return the time of a layer, the median of three graphs, in microseconds."""
    calls = [partial(layer.run, variant) for layer in layers]
    with ExitStack() as stack:
        if not variant.overlaps:
            for module in (linear, attention_decode):
                stack.enter_context(patch.object(module, "overlaps", lambda _device: False))
        return statistics.median(measure_us(calls) for _ in range(3))


def compile_all(layer: Layer, variants: list[Variant]) -> None:
    """Compile side by side; those that do not overlap by themselves, since they change modules."""

    @torch.inference_mode()
    def run(variant: Variant) -> None:
        layer.run(variant)

    run(variants[0])  # starts CUDA and makes the counters before the threads do
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, [variant for variant in variants if variant.overlaps]))
    torch.cuda.synchronize()


@torch.inference_mode()
def main() -> None:
    """Print a JSON line for each number of rows and variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[""], help="what variants' names begin with")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16])
    args = parser.parse_args()
    copy_rate = measure_copy_bytes_per_s()
    print(json.dumps({"copy_tb_per_s": round(copy_rate / 1e12, 3)}), flush=True)
    for num_rows in args.rows:
        layers = make_layers(num_rows)
        variants = [
            variant
            for variant in VARIANTS
            if variant.name.startswith(tuple(args.names))
            and (num_rows == 1 or not any(form.is_vector for form in variant.forms.values()))
        ]
        compile_all(layers[0], variants)
        for variant in variants:
            time_us = measure(layers, variant)
            line = {
                "rows": num_rows,
                "variant": variant.name,
                "layer_us": round(time_us, 2),
                "share_of_copy": round(LAYER_BYTES / copy_rate * 1e6 / time_us, 3),
            }
            print(json.dumps(line), flush=True)
            print(f"{num_rows:3} rows {time_us:7.1f} us  {variant.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
