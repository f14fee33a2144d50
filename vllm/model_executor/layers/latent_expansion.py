"""The matrix between latents and the keys and values of all heads, and the sizes of both.

Built by `layers/mla.py`, whose shapes' letters it shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm._custom_ops import linear as linear_ops
from vllm._custom_ops.latent import latent_keys
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.weight_place import PackedModule, Shard, WeightPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Sizes of multi-head latent attention, over all ranks.

    Attributes:
        query_rank: size that queries are made from, or None if from the hidden states.
        latent: L above.
        nope, rope: N and R above.
        value: V above.
        scale: factor of the logits.
        rope_settings: rope settings of the config.
        bias: whether the projections into latents and out of values have biases.
    """

    hidden_size: int
    num_heads: int
    query_rank: int | None
    latent: int
    nope: int
    rope: int
    value: int
    scale: float
    rope_settings: Mapping[str, Any]
    bias: bool

    @property
    def row(self) -> int:
        """Elements of a cached row."""
        return self.latent + self.rope


class LatentExpansion(PackedModule):
    """The matrix from latents to keys and values of this rank's heads, taken apart by head.

    Attributes:
        weight: [H (N + V), L], a head's key rows, then its value rows; None once packed.
    """

    fields: ClassVar[tuple[str, ...]] = ("weight",)
    key_packed: Tensor | None
    value_packed: Tensor | None

    def __init__(
        self, num_heads: int, sizes: LatentSizes, *, dtype: torch.dtype, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self._sizes = sizes
        self._rows = num_heads * (sizes.nope + sizes.value)
        self._total = sizes.num_heads * (sizes.nope + sizes.value)
        self._rank = tp.rank
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(self._rows, sizes.latent, dtype=dtype), requires_grad=False
        )
        self.register_buffer("key_packed", None, persistent=False)
        self.register_buffer("value_packed", None, persistent=False)

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; there is one shard, None."""
        assert self.weight is not None
        return WeightPlace(
            shape=(self._total, self._sizes.latent),
            target=self.weight.data,
            axis=0,
            start=self._rank * self._rows,
        )

    def pack(self) -> None:
        """Bring the heads' matrices into the CPU kernel's layout, free the original."""
        if self.weight is None or self.weight.device.type != "cpu":
            return
        keys_HNL, values_HVL = self._split()
        self.key_packed = linear_ops.pack_weight_stack(keys_HNL.transpose(1, 2))
        self.value_packed = linear_ops.pack_weight_stack(values_HVL)
        self.weight = None

    def absorb_query(self, query_THN: Tensor, out_THL: Tensor) -> None:
        """Write each head's query in the space of the latents."""
        if self.key_packed is None:
            keys_HNL, _ = self._split()
            torch.bmm(query_THN.transpose(0, 1), keys_HNL, out=out_THL.transpose(0, 1))
            return
        for head in range(self.num_heads):
            linear_ops.linear(out_THL[:, head], query_THN[:, head], self.key_packed[head])

    def expand_value(self, read_THL: Tensor, out_THV: Tensor) -> None:
        """Write the values that the heads have read as latents."""
        if self.value_packed is None:
            _, values_HVL = self._split()
            out_HTV = out_THV.transpose(0, 1)
            torch.bmm(read_THL.transpose(0, 1), values_HVL.transpose(1, 2), out=out_HTV)
            return
        for head in range(self.num_heads):
            linear_ops.linear(out_THV[:, head], read_THL[:, head], self.value_packed[head])

    def expand_rows(self, row_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [T, H, N + R] and values [T, H, V] of all heads from rows of the cache.

        Needs the matrix as loaded.
        """
        assert self.weight is not None, "the matrix is packed"
        sizes = self._sizes
        made_TX = torch.nn.functional.linear(row_TD[:, : sizes.latent], self.weight)
        made_THX = made_TX.unflatten(1, (self.num_heads, -1))
        value_THV = made_THX[:, :, sizes.nope :]
        key_THD = row_TD.new_empty(len(row_TD), self.num_heads, sizes.nope + sizes.rope)
        if row_TD.is_cuda:
            latent_keys(key_THD, made_THX, row_TD, sizes.rope)
            return key_THD, value_THV
        key_THD[:, :, : sizes.nope] = made_THX[:, :, : sizes.nope]
        key_THD[:, :, sizes.nope :] = row_TD[:, None, sizes.latent :]
        return key_THD, value_THV

    def _split(self) -> tuple[Tensor, Tensor]:
        assert self.weight is not None
        both = self.weight.data.unflatten(0, (self.num_heads, -1))
        keys_HNL, values_HVL = both.split((self._sizes.nope, self._sizes.value), dim=1)
        return keys_HNL, values_HVL
