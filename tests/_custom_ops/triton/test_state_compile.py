"""Chunked kernels of layers with a state compile for GPUs with less shared memory, and fit them.

python -m tests._custom_ops.triton.test_state_compile 86   # 80, 90, 120; as compile_for.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests._custom_ops.triton.compile_for import BF16, main
from tests._custom_ops.triton.test_compile import check_fits, compile_for
from vllm._custom_ops.triton.delta_chunks import run_delta_chunks
from vllm._custom_ops.triton.mamba2_chunks import Scan, run_mamba_chunks


def make_rows(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return offsets of states, cu_query_lens and tokens before, of rows with two new tokens."""
    offsets, computed = (torch.zeros(num_rows, n, dtype=torch.int32) for n in (1, 1))
    return offsets, 2 * torch.arange(num_rows + 1, dtype=torch.int32), computed.view(-1)


def apply_rule(num_rows: int, key: int, value: int) -> None:
    """The gated delta rule, four heads."""
    q, k, v = (torch.zeros(2 * num_rows, 4, size, dtype=BF16) for size in (key, key, value))
    gates = torch.zeros(2 * num_rows, 4), torch.zeros(2 * num_rows, 4)
    state = torch.zeros(1, 4, key, value)
    run_delta_chunks(
        v.clone(), (q, k, v), gates, state, make_rows(num_rows), key**-0.5, l2norm=True
    )


def scan(num_rows: int, size: int, state: int) -> None:
    """Mamba2, eight heads of one group."""
    x = torch.zeros(2 * num_rows, 8, size, dtype=BF16)
    b = torch.zeros(2 * num_rows, 1, state, dtype=BF16)
    offsets, cu_query_lens, computed = make_rows(num_rows)
    run_mamba_chunks(
        Scan(
            out=x.clone(), x=x, dt=torch.zeros(2 * num_rows, 8, dtype=BF16), a=torch.zeros(8), b=b,
            c=b.clone(), skip=torch.zeros(8), dt_bias=torch.zeros(8), dt_min=0.0, dt_max=1.0,
            state=torch.zeros(1, 8, size, state), state_offsets=offsets,
            cu_query_lens=cu_query_lens, lens=computed,
        )
    )  # fmt: skip


CASES: dict[str, Callable[[], None]] = {
    "delta rule, few rows": partial(apply_rule, 1, 128, 128),
    "delta rule, many rows": partial(apply_rule, 100, 128, 128),
    "Mamba2, many rows": partial(scan, 100, 64, 128),
    "Mamba2, large states": partial(scan, 1, 64, 256),
}


@pytest.mark.timeout(900)
def test_kernels_fit_where_there_is_less(tmp_path: Path) -> None:
    found = compile_for(86, tmp_path, cases="tests._custom_ops.triton.test_state_compile")
    check_fits(*found, num_kernels=5)
    assert max(line["shared"] for line in found[1]) > 64 << 10  # what there is is used


if __name__ == "__main__":
    sys.exit(main(CASES))
