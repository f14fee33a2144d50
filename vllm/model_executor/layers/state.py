"""What layers that keep a state share: the rows of a step, small parameters, the convolution.

Built by `linear_attention.py`, `mamba.py` and `short_conv.py`. States live in the cache and come
with each call; nothing here keeps one.

Shapes: T tokens, B rows, C channels of this rank; K taps of a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm._custom_ops import state_space as state_ops
from vllm.batch import AttentionState, ForwardBatch
from vllm.cache_spec import CacheField, LayerCacheSpec, State
from vllm.errors import ConfigError
from vllm.model_executor.layers.row_select_linear import RowSelection
from vllm.model_executor.layers.weight_place import Shard, WeightPlace
from vllm.types import DType

STATE_KIND = "state"
"""Name of the layer type of every layer with a state."""


RowArguments = tuple[Tensor, Tensor, Tensor]
"""Unit of each row's state, int32 [B]; bounds of the rows' tokens, int32 [B + 1]; int32 [B]: tokens
before the step (0 is a new row, whose state counts as zero) or, for step ops, after it."""


def has_step_ops(tensor: Tensor) -> bool:
    """Return whether the ops named `_step` serve the device of a tensor."""
    return tensor.device.type != "cpu"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateRows:
    """Where the states of a step's rows lie, as the state ops take it.

    Bounds count all tokens of the step, so that ops over some of the rows take whole tensors and
    leave the results of other rows alone.

    Attributes:
        fields: views of the layer's cache fields, [units, ...], in the order of its spec.
        single: on a GPU the rows of one token, which step ops serve in few launches; or None.
        others: all other rows, with tokens before the step; None if there are none.
        has_spare_tokens: see ForwardBatch.
    """

    fields: tuple[Tensor, ...]
    single: RowArguments | None
    others: RowArguments | None
    has_spare_tokens: bool = False

    def make_like(self, x_TC: Tensor) -> Tensor:
        """Return memory for what the ops write of each token, zero where they will not."""
        make = torch.zeros if self.has_spare_tokens else torch.empty
        return make(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)

    @staticmethod
    def read(layer: int, batch: ForwardBatch, attention: AttentionState) -> StateRows:
        """Return the rows of a step for decoder layer `layer`."""
        cache = attention.caches[layer]
        assert cache is not None, f"layer {layer} has no cache bound to it"
        bounds, lens = batch.cu_query_lens, batch.seq_lens
        offsets = batch.groups[cache.group].block_offsets[:, 0]
        if not has_step_ops(bounds):
            others = (offsets.contiguous(), bounds, lens - (bounds[1:] - bounds[:-1]))
            return StateRows(fields=cache.tensors, single=None, others=others)
        num_rows = lens.shape[0]
        num_single = num_rows if batch.max_query_len == 1 else batch.num_decode_rows
        computed = batch.computed_lens
        if computed is None and num_single < num_rows:
            computed = lens - (bounds[1:] - bounds[:-1])
        return StateRows(
            fields=cache.tensors,
            single=(
                (offsets[:num_single], bounds[: num_single + 1], lens[:num_single])
                if num_single
                else None
            ),
            others=(
                None
                if computed is None or num_single == num_rows
                else (offsets[num_single:], bounds[num_single:], computed[num_single:])
            ),
            has_spare_tokens=batch.has_spare_tokens,
        )


def state_field(name: str, shape: tuple[int, ...], dtype: DType) -> CacheField:
    """Return a cache field that is kept once for each sequence."""
    return CacheField(name=name, shape=shape, dtype=dtype, per="sequence")


def make_state_spec(layer: int, *fields: CacheField) -> LayerCacheSpec:
    """Return the spec of a decoder layer that keeps a state made of `fields`."""
    return LayerCacheSpec(layer=layer, fields=fields, lifetime=State(), kind=STATE_KIND)


def require_silu(activation: str, what: str) -> None:
    """Raise ConfigError if an activation is another than the one that the ops compute."""
    if activation not in ("silu", "swish"):
        raise ConfigError(
            f"{what} is {activation!r}; layers with a state are served with 'silu' only"
        )


class CausalConv(nn.Module):
    """A convolution of each channel over its last K inputs.

    Args:
        selection: the channels that this rank takes of the checkpoint's.
        taps: K, the length of the filters.
        silu: whether the result passes through x * sigmoid(x).

    Attributes:
        weight_KC: filters, one tap a row.
    """

    bias_C: nn.Parameter | None

    def __init__(
        self, selection: RowSelection, taps: int, *, bias: bool, silu: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._selection = selection
        self._silu = silu
        channels = len(selection.rows)
        self.weight_KC = nn.Parameter(torch.empty(taps, channels, dtype=dtype), requires_grad=False)
        self.register_parameter(
            "bias_C",
            nn.Parameter(torch.empty(channels, dtype=dtype), requires_grad=False) if bias else None,
        )

    @property
    def fields(self) -> tuple[str, ...]:
        """See HoldsWeights."""
        return ("weight",) if self.bias_C is None else ("weight", "bias")

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; checkpoints hold [channels, 1, taps]."""
        total, rows = self._selection.total, self._selection.rows
        if field == "weight":
            target = self.weight_KC.data.T[:, None]
            return WeightPlace(shape=(total, *target.shape[1:]), target=target, rows=rows)
        assert self.bias_C is not None
        return WeightPlace(shape=(total,), target=self.bias_C.data, rows=rows)

    def cache_field(self, dtype: DType) -> CacheField:
        """Return the field of the last K - 1 inputs, oldest first."""
        taps, channels = self.weight_KC.shape
        return state_field("conv", (taps - 1, channels), dtype)

    def forward(self, x_TC: Tensor, state: Tensor, rows: RowArguments) -> Tensor:
        """Return the convolved inputs of some rows, [T, C], and move their states on.

        Args:
            x_TC: inputs of the step, contiguous in C.
            state: the cache field of `cache_field`, [units, K - 1, C].
            rows: with tokens before the step; for tokens of other rows the result is anything.
        """
        out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        self._convolve(out_TC, x_TC, state, rows)
        return out_TC

    def forward_gated(
        self, before_TC: Tensor, x_TC: Tensor, after_TC: Tensor, state: Tensor, rows: StateRows
    ) -> Tensor:
        """Return after * conv(before * x), [T, C], and move the state on."""
        if rows.others is None:
            out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        else:
            given_TC = before_TC * x_TC
            conv_TC = rows.make_like(given_TC)
            self._convolve(conv_TC, given_TC, state, rows.others)
            out_TC = after_TC * conv_TC
        if rows.single is not None:
            self._step(out_TC, x_TC, before_TC, after_TC, state, rows.single)
        return out_TC

    def _convolve(self, out_TC: Tensor, x_TC: Tensor, state: Tensor, rows: RowArguments) -> None:
        weight_CK, state_CK = self.weight_KC.T, state.transpose(1, 2)
        state_ops.causal_conv1d(out_TC, x_TC, weight_CK, self.bias_C, state_CK, *rows, self._silu)

    def _step(
        self,
        out_TC: Tensor,
        x_TC: Tensor,
        before_TC: Tensor | None,
        after_TC: Tensor | None,
        state: Tensor,
        rows: RowArguments,
    ) -> None:
        state_ops.causal_conv1d_step(
            out_TC,
            x_TC,
            before_TC,
            after_TC,
            self.weight_KC.T,
            self.bias_C,
            state.transpose(1, 2),
            *rows,
            self._silu,
        )


class FloatVectors(nn.Module):
    """Vectors with a number for each head or expert, kept in float32.

    Args:
        names: names of the vectors in the checkpoint.
        size, first, total: numbers of this rank, the first of them, of all ranks.
    """

    def __init__(self, names: Sequence[str], size: int, first: int, total: int) -> None:
        super().__init__()
        self.fields = tuple(names)
        self._first = first
        self._total = total
        for name in names:
            vector = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)
            self.register_parameter(name, vector)

    def vector(self, name: str) -> Tensor:
        """Return a vector by its name, float32 [size]."""
        return self.get_parameter(name).data

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; there is one shard, None."""
        return WeightPlace(
            shape=(self._total,), target=self.vector(field), axis=0, start=self._first
        )


class GatedRMSNorm(nn.Module):
    """RMS norm of groups of channels with a gate before or after it.

    Args:
        num_weights, first_weight, total_weights: weights of this rank, the first of them, of all
            ranks; as many as a group has, or as all channels.
        group_size: channels that are normed together.
        gate_first: whether the gate multiplies before the norm.
    """

    fields: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self,
        num_weights: int,
        first_weight: int,
        total_weights: int,
        *,
        group_size: int,
        gate_first: bool,
        epsilon: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self._first = first_weight
        self._total = total_weights
        self._group_size = group_size
        self._gate_first = gate_first
        self.weight = nn.Parameter(torch.empty(num_weights, dtype=dtype), requires_grad=False)

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; there is one shard, None."""
        return WeightPlace(shape=(self._total,), target=self.weight.data, axis=0, start=self._first)

    def forward(self, x_TC: Tensor, gate_TC: Tensor) -> Tensor:
        """Overwrite `x` with its gated norm and return it."""
        state_ops.gated_rms_norm(
            x_TC, x_TC, gate_TC, self.weight, self.epsilon, self._group_size, self._gate_first
        )
        return x_TC
