"""What the worker and the loader expect of a model.

Families implement it through `causal_lm.CausalLM`; models of others need only have these methods.
`ModelRegistry` reads the capability flags that a class may carry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from vllm.batch import AttentionState, ForwardBatch
from vllm.cache_spec import LayerCacheSpec

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.attention.layer import Attention
    from vllm.model_executor.models.weight_map import LoadReport


class TextModel(Protocol):
    """A decoder-only language model on one rank.

    Its class is called with (config, *, dtype, tp, cache_dtype=None, max_model_len=None): the
    checkpoint's config as a plain normalised dict, the element type of weights and activations, the
    ranks, the element type of the cache (None is `dtype`), and the longest sequence that is served
    (None is the config's own).
    """

    def cache_specs(self) -> tuple[LayerCacheSpec, ...]:
        """Return what each decoder layer keeps on this rank, in order."""
        ...

    def attention_layers(self) -> Mapping[int, Attention]:
        """Return layer index -> attention module, for the choice and binding of kernels."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> LoadReport:
        """Take the checkpoint's tensors, by their Hugging Face names; called once.

        Raises:
            WeightError: a tensor is missing or does not fit.
        """
        ...

    def finish_loading(self) -> None:
        """Bring the weights into the form that the kernels read; called once, after loading."""
        ...

    def forward(self, batch: ForwardBatch, attention: AttentionState) -> Tensor:
        """Return the hidden states after the last norm, [T, hidden_size].

        Where the batch names `kept_rows`, those of these tokens alone, [L, hidden_size]. Those of
        tokens that stayed behind at a cut are zero.
        """
        ...

    def compute_logits(self, hidden_LE: Tensor) -> Tensor:
        """Return logits over the whole vocabulary, [L, vocab_size], on every rank.

        They are float32, or on a GPU of the model's element type.
        """
        ...
