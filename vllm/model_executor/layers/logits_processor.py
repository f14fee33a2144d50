"""Hidden states to logits over the whole vocabulary.

Called by models in `compute_logits`. Works row by row; what the sampler does with the logits is not
known here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm._custom_ops import activation as activation_ops
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.vocab_parallel_embedding import VocabMatrix


class LogitsProcessor(nn.Module):
    """The output matrix, then scale, soft cap, gathering over the ranks and cutting of the padding.

    Args:
        vocab_size: columns that remain.
        scale: factor of the logits.
        soft_cap: c of c*tanh(x/c); 0 is none.
    """

    def __init__(
        self, vocab_size: int, *, tp: TensorParallel, scale: float = 1.0, soft_cap: float = 0.0
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.scale = scale
        self.soft_cap = soft_cap
        self._tp = tp

    def forward(self, head: VocabMatrix, hidden_LE: Tensor) -> Tensor:
        """Return [L, vocab_size] on every rank: float32, or on a GPU the type of `hidden`.

        Values are rounded to the latter before scale and cap in any case.
        """
        is_plain = not self.soft_cap and self.scale == 1.0
        own_LV = head.multiply(hidden_LE, None, out_dtype=torch.float32, may_stay=is_plain)
        logits_LV = self._tp.all_gather(own_LV, dim=-1)[:, : self.vocab_size]
        if self.soft_cap:
            activation_ops.soft_cap(logits_LV, self.scale, self.soft_cap)
        elif self.scale != 1.0:
            logits_LV *= self.scale
        return logits_LV
