"""Compiles the kernels of known models for a GPU that is not there; run as a process of its own.

    python -m tests._custom_ops.triton.compile_for 80   # 86, 90, 120; [--shared BYTES] [CASE ...]

Calls the ops with tensors of the CPU while a stand-in for Triton's driver launches nothing: sizes
that a compiled kernel depends on (heads, experts, states, element types) are those of the models,
the others are small. Prints a JSON line for each kernel: its name, shared memory, registers and
bytes spilled a thread. Triton itself refuses what does not fit the multiprocessor's shared memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tests._custom_ops.triton.stand_in import Driver
from tests._custom_ops.triton.test_attention import Problem, make_args
from vllm._custom_ops.triton import (
    attention,
    batch,
    linear,
    linear_table,
    moe,
)

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 120: 99 << 10}
NUM_PROCESSORS = {80: 108, 86: 84, 90: 132, 120: 188}
BF16 = torch.bfloat16


def attend(heads: int, kv_heads: int, size: int, **more: Any) -> None:
    """Rows of one new token, of few and of many, with cached ones before them and without."""
    mask = {name: more.pop(name) for name in ("window", "soft_cap", "has_sinks") if name in more}
    for rows in (((300, 1), (40, 1)), ((0, 200), (0, 40)), ((300, 200), (40, 5))):
        problem = Problem(
            rows=rows, heads=heads, kv_heads=kv_heads, head_size=size, dtype=BF16, **more
        )
        attention.attend(
            make_args(problem.arguments(**mask)),
            num_decode_rows=sum(new == 1 for _, new in rows),
            max_query_len=max(new for _, new in rows),
            max_seq_len=32768,
        )


def attend_to_new(heads: int, kv_heads: int, size: int) -> None:
    """Prompts whose rows of K and V lie behind each other."""
    query, key = (torch.zeros(200, n, size, dtype=BF16) for n in (heads, kv_heads))
    lens = torch.tensor([0, 200], dtype=torch.int32)
    attention.prompt_attention(torch.zeros_like(query), query, key, key.clone(), lens, 200, 1.0)


def multiply(n: int, k: int, *, activation: str = "") -> None:
    """Few rows by a weight, in every form that the table has for them."""
    is_gated = activation in linear.GATED_ACTIVATIONS
    weight = torch.zeros(2 * n if is_gated else n, k, dtype=BF16)
    for num_rows in (1, 16, 32, 64):
        if linear_table.is_skinny(num_rows, n, k, is_gated=is_gated):
            out, x = torch.zeros(num_rows, n, dtype=BF16), torch.zeros(num_rows, k, dtype=BF16)
            if activation == linear.RELU2:
                linear.skinny_relu2_linear(out, x, weight, None)
            elif activation:
                linear.skinny_gated_linear(out, x, weight, None, activation)
            else:
                linear.skinny_linear(out, x, weight, None)


def leave_parts(n: int, k: int) -> None:
    """The same, its sums over parts of K left."""
    weight = torch.zeros(n, k, dtype=BF16)
    for num_rows in (1, 16, 64):
        x = torch.zeros(num_rows, k, dtype=BF16)
        linear.skinny_linear_parts(torch.zeros(4, num_rows, n), x, weight)


def mix(
    experts: int,
    chosen: int,
    hidden: int,
    inner: int,
    *,
    num_tokens: int,
    dtype: torch.dtype = BF16,
) -> None:
    """A mixture of experts; few experts stand in for all of them."""
    x = torch.zeros(num_tokens, hidden, dtype=dtype)
    first = torch.zeros(experts, 2 * inner, hidden, dtype=dtype)
    second = torch.zeros(experts, hidden, inner, dtype=dtype)
    weights = torch.zeros(num_tokens, chosen)
    ids = torch.zeros(num_tokens, chosen, dtype=torch.int32)
    moe.fused_experts(torch.zeros_like(x), x, first, second, weights, ids, inner, "silu")


def prepare_rows() -> None:
    """What a decode step begins with."""
    columns = torch.zeros(3, 4, dtype=torch.int64)
    ids, positions = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    lens, slots = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    offsets, table = (torch.zeros(4, 2048, dtype=torch.int32) for _ in range(2))
    batch.prepare_decode_tokens(ids, positions, lens, *columns, positions.clone())
    batch.prepare_decode_group(offsets, slots, columns[0], positions, table, 16, -1)


CASES: dict[str, Callable[[], None]] = {
    "attention, Qwen2": partial(attend, 28, 4, 128),
    "attention, Gemma 3": partial(attend, 8, 4, 256, window=1024),
    "attention, Gemma 2": partial(attend, 16, 8, 256, window=4096, soft_cap=50.0),
    "attention, Qwen3-Next": partial(attend, 16, 2, 256),
    "attention, gpt-oss": partial(attend, 64, 8, 64, window=128, has_sinks=True),
    "attention, DeepSeek-V2": partial(attend, 16, 1, 576, has_one_field=True),
    "prompts, Qwen2": partial(attend_to_new, 28, 4, 128),
    "prompts, Gemma 3": partial(attend_to_new, 8, 4, 256),
    "prompts, gpt-oss": partial(attend_to_new, 64, 8, 64),
    "products, narrow": partial(multiply, 3584, 3584),
    "products, wide": partial(multiply, 18560, 4096),
    "products, few": partial(multiply, 2048, 4096),
    "products, largest": partial(multiply, 65536, 1024),
    "products, relu2": partial(multiply, 21504, 4096, activation="relu2"),
    "products, silu": partial(multiply, 4096, 2048, activation="silu"),
    "products, few, silu": partial(multiply, 512, 2048, activation="silu"),
    "products, wide, silu": partial(multiply, 18944, 2048, activation="silu"),
    "products, gelu": partial(multiply, 10240, 2048, activation="gelu_tanh"),
    "products, parts": partial(leave_parts, 3584, 3584),
    "products, parts of a long K": partial(leave_parts, 4096, 8192),
    "mixture, a token": partial(mix, 8, 6, 2048, 1408, num_tokens=1),
    "mixture, few tokens": partial(mix, 8, 6, 2048, 1408, num_tokens=8),
    "mixture, a batch": partial(mix, 8, 6, 2048, 1408, num_tokens=64),
    "mixture, prompts": partial(mix, 8, 6, 2048, 1408, num_tokens=512),
    "mixture, a token in float32": partial(mix, 8, 2, 28, 20, num_tokens=1, dtype=torch.float32),
    "mixture, few tokens in float32": partial(mix, 8, 2, 28, 20, num_tokens=8, dtype=torch.float32),
    "rows of a step": prepare_rows,
}


class Gpu(Driver):
    """A GPU of one architecture, which notes what would be loaded on it."""

    def __init__(self, arch: int, shared_bytes: int) -> None:
        self.arch = arch
        self.shared_bytes = shared_bytes
        self.utils = self  # type: ignore[assignment]

    def get_current_target(self) -> GPUTarget:
        """See Triton."""
        return GPUTarget("cuda", self.arch, 32)

    def get_device_capability(self, device: int) -> tuple[int, int]:
        """See Triton."""
        return divmod(self.arch, 10)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """See Triton."""
        return {"max_shared_mem": self.shared_bytes}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, ...]:
        """Read what the compiler says of a kernel."""
        resources = read_resources(cubin)
        print(json.dumps({"kernel": name, "shared": shared, **resources}), flush=True)
        return 1, 2, resources["registers"], resources["stack"], 1024


def read_resources(cubin: bytes) -> dict[str, int]:
    """Return registers and bytes of stack of a thread; what is spilled lies on the stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    fields = dict(part.split(":", 1) for part in said.split() if part.count(":") == 1)
    return {"registers": int(fields["REG"]), "stack": int(fields["STACK"])}


def play_gpu(arch: int) -> None:
    """Let the host code choose what it chooses on such a GPU."""
    answers = {
        "is_hopper": arch >= 90,
        "has_warp_group_products": arch == 90,
        "holds_hopper_tiles": arch == 90,
        "count_processors": NUM_PROCESSORS[arch],
        "find_shared_bytes": SHARED_BYTES[arch],
    }
    hosts = [m for name, m in sys.modules.items() if name.startswith("vllm._custom_ops.triton.")]
    for module in hosts:
        for name in answers.keys() & vars(module).keys():
            setattr(module, name, lambda _, answer=answers[name]: answer)


def main(cases: Mapping[str, Callable[[], None]]) -> int:
    """Compile everything; say which cases failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arch", type=int, choices=SHARED_BYTES)
    parser.add_argument("cases", nargs="*", default=list(cases))
    parser.add_argument("--shared", type=int, help="bytes of shared memory, not the GPU's own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    driver.set_active(Gpu(args.arch, args.shared or SHARED_BYTES[args.arch]))
    play_gpu(args.arch)
    failed = 0
    for name in args.cases:
        try:
            cases[name]()
        except Exception as error:
            failed += 1
            print(json.dumps({"case": name, "error": f"{type(error).__name__}: {error}"[:400]}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(CASES))
