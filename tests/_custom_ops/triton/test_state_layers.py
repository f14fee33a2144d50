"""Layers with a state over the GPU's ops: the same as over the CPU's, row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.utils.ops import random_rows
from tests.utils.states import assert_close, make_state_rows
from vllm._custom_ops import state_space as doors
from vllm.batch import AttentionState, ForwardBatch, GroupBatch, LayerCache
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers import state as state_layers
from vllm.model_executor.layers.linear_attention import DeltaNetSizes, GatedDeltaNet
from vllm.model_executor.layers.mamba import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.layers.short_conv import ShortConv

HIDDEN = 32
STEPS = {
    "decode": ([1, 1, 1], [4, 0, 9]),
    "mixed": ([1, 1, 5, 3], [4, 9, 0, 2]),
    "prompt": ([7, 2], [0, 3]),
}


def make_delta_net() -> nn.Module:
    sizes = DeltaNetSizes(
        key_heads=1, value_heads=2, key_size=16, value_size=16, conv_taps=4, is_interleaved=False
    )
    tp = TensorParallel.single()
    return GatedDeltaNet(0, HIDDEN, sizes, epsilon=1e-6, dtype=torch.float32, tp=tp)


def make_mamba() -> nn.Module:
    sizes = Mamba2Sizes(
        num_heads=2, head_size=16, num_groups=2, state_size=16, conv_taps=4, conv_bias=True,
        proj_bias=False, dt_min=0.0, dt_max=float("inf"),
    )  # fmt: skip
    tp = TensorParallel.single()
    return Mamba2Mixer(0, HIDDEN, sizes, epsilon=1e-6, dtype=torch.float32, tp=tp)


def make_short_conv() -> nn.Module:
    tp = TensorParallel.single()
    return ShortConv(0, HIDDEN, 3, bias=True, dtype=torch.float32, tp=tp)


def run_step(
    layer: nn.Module, lengths: list[int], computed: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Return outputs of one step and all bytes of the states."""
    rows = [
        make_state_rows(field.shape, torch.float32, lengths, computed, "cpu")
        for field in layer.spec.fields
    ]
    block_offsets = rows[-1].offsets[:, None]
    views = [rows[-1].view]
    for field in rows[:-1]:  # each field in memory of its own, at the offsets of the largest
        wide = torch.full((rows[-1].view.shape[0], *field.view.shape[1:]), float("nan"))
        for source, target in zip(field.offsets, rows[-1].offsets, strict=True):
            wide[int(target)] = field.view[int(source)]
        views.insert(0, wide)
    batch = ForwardBatch(
        input_ids=torch.zeros(sum(lengths), dtype=torch.int64),
        positions=torch.zeros(sum(lengths), dtype=torch.int64),
        cu_query_lens=rows[-1].cu_query_lens,
        seq_lens=rows[-1].seq_lens,
        logits_rows=torch.zeros(0, dtype=torch.int64),
        groups=(
            GroupBatch(
                block_offsets=block_offsets,
                slots=torch.zeros(0, 2, dtype=torch.int32),
                block_tokens=1,
            ),
        ),
        max_query_len=max(lengths),
        max_seq_len=max(map(sum, zip(lengths, computed, strict=True))),
        num_decode_rows=lengths.count(1),
    )
    state = AttentionState(caches=(LayerCache(group=0, tensors=tuple(views)),), plans={})
    x = random_rows(sum(lengths), HIDDEN, dtype=torch.float32, seed=5)
    return layer(x, batch, state), views


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("make", "few_heads"),
    [(make_delta_net, 256), (make_delta_net, 0), (make_mamba, 256), (make_short_conv, 256)],
)
def test_same_as_over_the_cpu_ops(
    make: Callable[[], nn.Module], few_heads: int, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of few and of many heads: with the delta net's norm in its kernel and after it."""
    from vllm._custom_ops.triton import causal_conv, delta_rule, gated_norm, mamba2

    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    torch.manual_seed(1)
    layer = make()
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.3)
    expected, expected_states = run_step(layer, *STEPS[step])
    monkeypatch.setattr(delta_rule, "_FEW_HEADS", few_heads)
    monkeypatch.setattr(state_layers, "has_step_ops", lambda tensor: True)
    for module in (causal_conv, delta_rule, gated_norm, mamba2):
        for name, function in module.OPS.items():
            monkeypatch.setattr(doors, name, function)
    actual, states = run_step(layer, *STEPS[step])
    assert_close(actual, expected, 1e-5)
    for found, wanted in zip(states, expected_states, strict=True):
        assert_close(found, wanted, 1e-5)
