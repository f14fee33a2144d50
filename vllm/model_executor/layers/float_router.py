"""A router whose logits are float32, whatever the model's type: DeepSeek-V2 and Nemotron-H.

Built by the families' expert layers. Products of two bfloat16 numbers are exact in float32, so on a
GPU a matrix that bfloat16 can hold is multiplied as it is, with float32 sums and results.

Shapes: T tokens, E hidden size, N experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.model_executor.layers.linear import ReplicatedLinear

_NARROW = torch.bfloat16


class FloatRouter(ReplicatedLinear):
    """The float32 matrix of a router, on every rank.

    Attributes:
        narrow: the same matrix in bfloat16, on a GPU and only if it is the same; then there is no
            `weight`.
    """

    narrow: Tensor | None

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__(hidden_size, num_experts, bias=False, dtype=torch.float32)
        self.register_buffer("narrow", None, persistent=False)

    def pack(self) -> None:
        """Bring the weight into the form that is multiplied and free the original."""
        if self.weight is None or self.weight.device.type == "cpu":
            super().pack()
            return
        narrow = self.weight.data.to(_NARROW)
        if torch.equal(narrow.float(), self.weight.data):
            self.narrow, self.weight = narrow, None

    def forward(self, x_TE: Tensor) -> Tensor:
        """Return logits, float32 [T, N]."""
        if self.narrow is None:
            return super().forward(x_TE.float())
        if x_TE.dtype != _NARROW:
            return x_TE.float() @ self.narrow.float().t()
        return torch.mm(x_TE, self.narrow.t(), out_dtype=torch.float32)
