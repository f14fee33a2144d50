"""Small layers with a state, and one step of a layer outside of an engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.utils.ops import random_rows
from tests.utils.states import make_state_rows
from vllm.batch import AttentionState, ForwardBatch, GroupBatch, LayerCache
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.linear_attention import DeltaNetSizes, GatedDeltaNet
from vllm.model_executor.layers.mamba import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.layers.short_conv import ShortConv

HIDDEN = 32
STEPS = {
    "decode": ([1, 1, 1], [4, 0, 9]),
    "mixed": ([1, 1, 5, 3], [4, 9, 0, 2]),
    "prompt": ([7, 2], [0, 3]),
}
"""Lengths of rows and tokens before the step, rows of one token first."""


def draw_weights(layer: nn.Module) -> nn.Module:
    """Give a layer small random weights."""
    torch.manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.3)
    return layer


def make_delta_net() -> nn.Module:
    """A gated delta net."""
    sizes = DeltaNetSizes(
        key_heads=1, value_heads=2, key_size=16, value_size=16, conv_taps=4, is_interleaved=False
    )
    tp = TensorParallel.single()
    return draw_weights(GatedDeltaNet(0, HIDDEN, sizes, epsilon=1e-6, dtype=torch.float32, tp=tp))


def make_mamba() -> nn.Module:
    """A Mamba-2 mixer of two groups."""
    sizes = Mamba2Sizes(
        num_heads=2, head_size=16, num_groups=2, state_size=16, conv_taps=4, conv_bias=True,
        proj_bias=False, dt_min=0.0, dt_max=float("inf"),
    )  # fmt: skip
    tp = TensorParallel.single()
    return draw_weights(Mamba2Mixer(0, HIDDEN, sizes, epsilon=1e-6, dtype=torch.float32, tp=tp))


def make_short_conv() -> nn.Module:
    """A short convolution."""
    tp = TensorParallel.single()
    return draw_weights(ShortConv(0, HIDDEN, 3, bias=True, dtype=torch.float32, tp=tp))


@dataclass(frozen=True, kw_only=True)
class LayerStep:
    """A layer's inputs in one step.

    Attributes:
        states: views of its cache fields.
    """

    x: Tensor
    batch: ForwardBatch
    states: tuple[Tensor, ...]

    @property
    def memory(self) -> list[Tensor]:
        """All bytes of each field; the views overlap themselves and cannot be copied into."""
        flat = []
        for view in self.states:
            size = view.untyped_storage().nbytes() // view.dtype.itemsize
            flat.append(view.as_strided((size,), (1,), 0))
        return flat

    def run(self, layer: nn.Module) -> Tensor:
        """Return the layer's output and move its states on."""
        caches = (LayerCache(group=0, tensors=self.states),)
        return layer(self.x, self.batch, AttentionState(caches=caches, plans={}))


def make_step(
    layer: nn.Module, lengths: list[int], computed: list[int], device: str = "cpu"
) -> LayerStep:
    """Make a step; states of rows that begin are NaN."""
    rows = [
        make_state_rows(field.shape, torch.float32, lengths, computed, device)
        for field in layer.spec.fields
    ]
    last = rows[-1]
    views = [last.view]
    for field in rows[:-1]:  # each field in memory of its own, at the offsets of the last
        shape = (last.view.shape[0], *field.view.shape[1:])
        wide = torch.full(shape, float("nan"), device=device)
        wide[last.offsets.long()] = field.view[field.offsets.long()]
        views.insert(0, wide)
    num_tokens = sum(lengths)
    nothing = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    group = GroupBatch(
        block_offsets=last.offsets[:, None],
        slots=torch.zeros(0, 2, dtype=torch.int32, device=device),
        block_tokens=1,
    )
    batch = ForwardBatch(
        input_ids=nothing,
        positions=nothing,
        cu_query_lens=last.cu_query_lens,
        seq_lens=last.seq_lens,
        logits_rows=nothing[:0],
        groups=(group,),
        max_query_len=max(lengths),
        max_seq_len=max(map(sum, zip(lengths, computed, strict=True))),
        num_decode_rows=lengths.count(1),
    )
    x = random_rows(num_tokens, HIDDEN, dtype=torch.float32, seed=5).to(device)
    return LayerStep(x=x, batch=batch, states=tuple(views))
