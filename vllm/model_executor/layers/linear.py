"""Linear layers, split over tensor-parallel ranks.

Built by `models/blocks.py`. A layer starts with a plain weight that the loader fills; on a CPU
`pack` replaces it by the layout of the kernel, on a GPU it stays. Split sizes are checked here;
checkpoints and names are not known.

Shapes: T tokens, K inputs, N outputs, all of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm._custom_ops import linear as linear_ops
from vllm._custom_ops.triton.linear_table import MAX_ROWS, count_parts, is_skinny
from vllm.distributed.parallel_state import TensorParallel
from vllm.errors import ConfigError
from vllm.model_executor.layers.activation import relu2
from vllm.model_executor.layers.parts import Product, ProductParts
from vllm.model_executor.layers.weight_place import PackedModule, Shard, WeightPlace

SKINNY_DTYPES = (torch.bfloat16, torch.float16)
"""Of what our kernels for few rows multiply on a GPU."""


class Linear(PackedModule):
    """A matrix of this rank: y = x W^T + b.

    Args:
        input_size, output_size: columns and rows that this rank holds.

    Attributes:
        weight: [N, K], None once packed.
        bias: [N] or None.
        packed: the weight in the CPU kernel's layout, None until `pack`.
    """

    packed: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self, input_size: int, output_size: int, *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(output_size, input_size, dtype=dtype), requires_grad=False
        )
        self.register_parameter(
            "bias",
            nn.Parameter(torch.empty(output_size, dtype=dtype), requires_grad=False)
            if bias
            else None,
        )
        self.register_buffer("packed", None, persistent=False)

    @property
    def fields(self) -> tuple[str, ...]:
        """See HoldsWeights."""
        return ("weight",) if self.bias is None else ("weight", "bias")

    def parameter(self, field: str) -> Tensor:
        """Return the parameter of a field; not to be called after `pack`."""
        held = self.weight if field == "weight" else self.bias
        assert held is not None, f"{field} is absent or packed already"
        return held.data

    def pack(self) -> None:
        """Bring the weight into the CPU kernel's layout and free the original; no-op elsewhere."""
        if self.weight is None or self.weight.device.type != "cpu":
            return
        self.packed = linear_ops.pack_linear_weight(self.weight.data)
        self.weight = None

    def multiply(
        self,
        x_TK: Tensor,
        bias: Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
        may_stay: bool = False,
    ) -> Tensor:
        """Return x W^T + bias, [T, N].

        Args:
            x_TK: [T, K].
            bias: [N] or None.
            out_dtype: element type of the result; None is that of `x`. Values are rounded to that
                of `x` in any case.
            may_stay: let the result have the type of `x` where another would take a pass over it.
        """
        dtype = out_dtype or x_TK.dtype
        if self.packed is None:
            assert self.weight is not None
            if self._is_skinny(x_TK):
                out_TN = x_TK.new_empty(x_TK.shape[0], self.output_size, dtype=dtype)
                linear_ops.skinny_linear(out_TN, x_TK, self.weight, bias)
                return out_TN
            out_TN = F.linear(x_TK, self.weight, bias)
            return out_TN if may_stay and out_TN.is_cuda else out_TN.to(dtype)
        out_TN = linear_ops.empty_output(x_TK.shape[0], self.output_size, dtype)
        linear_ops.linear(out_TN, x_TK, self.packed, bias)
        return out_TN

    def multiply_to_parts(self, x_TK: Tensor) -> Product:
        """Return x W^T + b, [T, N], still in parts where few rows are multiplied faster so."""
        num_parts = 0
        if self.weight is not None and x_TK.dtype in SKINNY_DTYPES and 0 < len(x_TK) <= MAX_ROWS:
            num_parts = count_parts(len(x_TK), self.output_size, self.input_size, x_TK.device)
        if num_parts == 0:
            return self.multiply(x_TK, self.bias)
        assert self.weight is not None
        parts_PTN = x_TK.new_empty(num_parts, len(x_TK), self.output_size, dtype=torch.float32)
        linear_ops.skinny_linear_parts(parts_PTN, x_TK, self.weight)
        return ProductParts(parts_PTN=parts_PTN, bias_N=self.bias, dtype=x_TK.dtype)

    def _is_skinny(self, x_TK: Tensor, *, is_gated: bool = False) -> bool:
        """Whether a kernel of ours for few rows multiplies them, not torch."""
        if not (x_TK.is_cuda and x_TK.dtype in SKINNY_DTYPES) or x_TK.shape[0] > MAX_ROWS:
            return False
        num_outputs = self.output_size // 2 if is_gated else self.output_size
        return is_skinny(x_TK.shape[0], num_outputs, self.input_size, is_gated=is_gated)

    def forward(self, x_TK: Tensor) -> Tensor:
        """Return this rank's outputs, [T, N]."""
        return self.multiply(x_TK, self.bias)


class ReplicatedLinear(Linear):
    """The whole matrix on every rank."""

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; there is one shard, None."""
        target = self.parameter(field)
        return WeightPlace(shape=tuple(target.shape), target=target)


class MergedColumnParallelLinear(Linear):
    """Several matrices over one input, outputs of each split over the ranks, multiplied at once.

    Args:
        input_size: columns.
        output_sizes: shard name -> rows over all ranks, in the order of the outputs.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel,
        what: str = "output size",
    ) -> None:
        local = {name: tp.split(size, what) for name, size in output_sizes.items()}
        super().__init__(input_size, sum(local.values()), bias=bias, dtype=dtype)
        self._places: dict[str, tuple[int, int, int, int]] = {}
        row = 0
        for name, size in local.items():
            self._places[name] = (output_sizes[name], row, size, tp.rank * size)
            row += size

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; shards are the names in `output_sizes`, None is one tensor of all."""
        if shard is None:
            return self._place_all(field)
        assert isinstance(shard, str)
        total, row, size, start = self._places[shard]
        target = self.parameter(field)[row : row + size]
        return WeightPlace(shape=(total, *target.shape[1:]), target=target, axis=0, start=start)

    def multiply_gated(self, x_TK: Tensor, activation: nn.Module, name: str) -> Tensor:
        """Return act(gate) * up of a layer whose outputs are gate, then up: [T, N / 2].

        Args:
            x_TK: [T, K].
            activation: computes it from gate and up side by side.
            name: what it is called by our ops: "silu", "gelu" or "gelu_tanh".
        """
        if self.weight is None or not self._is_skinny(x_TK, is_gated=True):
            return activation(self(x_TK))
        out_TI = x_TK.new_empty(x_TK.shape[0], self.output_size // 2)
        linear_ops.skinny_gated_linear(out_TI, x_TK, self.weight, self.bias, name)
        return out_TI

    def multiply_relu2(self, x_TK: Tensor) -> Tensor:
        """Return relu(x W^T + b) ** 2, [T, N]."""
        if self.weight is None or not self._is_skinny(x_TK):
            return relu2(self(x_TK))
        out_TN = x_TK.new_empty(x_TK.shape[0], self.output_size)
        linear_ops.skinny_relu2_linear(out_TN, x_TK, self.weight, self.bias)
        return out_TN

    def _place_all(self, field: str) -> WeightPlace:
        target, rows, first = self.parameter(field), [], 0
        for total, _, size, start in self._places.values():
            rows.append(torch.arange(first + start, first + start + size, device="cpu"))
            first += total
        return WeightPlace(shape=(first, *target.shape[1:]), target=target, rows=torch.cat(rows))


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One matrix, its outputs split over the ranks."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel,
        what: str = "output size",
    ) -> None:
        super().__init__(input_size, {"": output_size}, bias=bias, dtype=dtype, tp=tp, what=what)

    def place(self, field: str, shard: Shard = None) -> WeightPlace:
        """See HoldsWeights; there is one shard, None."""
        return super().place(field, "")


class QKVParallelLinear(Linear):
    """Query, key and value projections in one matrix, split by heads.

    With fewer KV heads than ranks, neighbouring ranks hold copies of one KV head.

    Args:
        num_heads, num_kv_heads: heads over all ranks.

    Attributes:
        num_heads, num_kv_heads: heads of this rank.
        q_size, kv_size: outputs of this rank that are query, and key (as many value).
    """

    def __init__(
        self,
        input_size: int,
        head_size: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel,
    ) -> None:
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
                f"({num_kv_heads})"
            )
        self_heads = tp.split(num_heads, "num_attention_heads")
        self_kv_heads, first_kv_head = split_kv_heads(num_kv_heads, tp)
        q_size, kv_size = self_heads * head_size, self_kv_heads * head_size
        super().__init__(input_size, q_size + 2 * kv_size, bias=bias, dtype=dtype)
        self.num_heads = self_heads
        self.num_kv_heads = self_kv_heads
        self.q_size = q_size
        self.kv_size = kv_size
        q_total, kv_total = num_heads * head_size, num_kv_heads * head_size
        kv_start = first_kv_head * head_size
        self._places = {
            "q": (q_total, 0, q_size, tp.rank * q_size),
            "k": (kv_total, q_size, kv_size, kv_start),
            "v": (kv_total, q_size + kv_size, kv_size, kv_start),
        }

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; shards are "q", "k" and "v"."""
        assert isinstance(shard, str)
        total, row, size, start = self._places[shard]
        target = self.parameter(field)[row : row + size]
        return WeightPlace(shape=(total, *target.shape[1:]), target=target, axis=0, start=start)


class RowParallelLinear(Linear):
    """One matrix, its inputs split over the ranks; the ranks' products are added up.

    Args:
        input_size: columns over all ranks.
        is_partial: leave the sum over the ranks to the caller; then there is no bias.
        leaves_parts: let `contribute` leave a product of few rows in parts, see `parts.py`, where
            this rank has the whole sum and there is no bias.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel,
        what: str = "input size",
        is_partial: bool = False,
        leaves_parts: bool = False,
    ) -> None:
        assert not (bias and is_partial), "every rank would add the bias"
        super().__init__(tp.split(input_size, what), output_size, bias=bias, dtype=dtype)
        self._leaves_parts = leaves_parts and tp.size == 1 and not bias
        self._total = input_size
        self._tp = tp
        self._is_partial = is_partial

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; there is one shard, None."""
        target = self.parameter(field)
        if field == "bias":
            return WeightPlace(shape=tuple(target.shape), target=target)
        return WeightPlace(
            shape=(self.output_size, self._total),
            target=target,
            axis=1,
            start=self._tp.rank * self.input_size,
        )

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all inputs, so that no other rank has a part of the outputs."""
        return self._tp.size == 1

    def forward(self, x_TK: Tensor) -> Tensor:
        """Return [T, N]: whole on every rank with the bias added once, or this rank's part."""
        if self.is_whole or self._is_partial:
            return self.multiply(x_TK, self.bias)
        out_TN = self._tp.all_reduce(self.multiply(x_TK, None))
        return out_TN if self.bias is None else out_TN + self.bias

    def contribute(self, x_TK: Tensor, tokens_L: Tensor | None = None) -> Product:
        """Return what all tokens, [T, N], or some, [L, N], give to the stream, maybe in parts.

        Args:
            x_TK: [T, K].
            tokens_L: int64 [L], which of them; None is all.
        """
        x_LK = x_TK if tokens_L is None else x_TK[tokens_L]
        if not len(x_LK):
            return x_LK.new_empty(0, self.output_size)
        return self.multiply_to_parts(x_LK) if self._leaves_parts else self(x_LK)


def split_kv_heads(num_kv_heads: int, tp: TensorParallel) -> tuple[int, int]:
    """Return (number, first) of the KV heads that this rank holds.

    Raises:
        ConfigError: if neither divides the other.
    """
    if num_kv_heads >= tp.size:
        size = tp.split(num_kv_heads, "num_key_value_heads")
        return size, tp.rank * size
    if tp.size % num_kv_heads:
        raise ConfigError(
            f"num_key_value_heads ({num_kv_heads}) can be neither split nor copied evenly over "
            f"tensor_parallel_size={tp.size} ranks; one must be a multiple of the other"
        )
    return 1, tp.rank // (tp.size // num_kv_heads)
