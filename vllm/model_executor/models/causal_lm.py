"""The decoder-only language model that every family is an instance of.

A family's class gives two things: `read_shape`, which turns a config into a `ModelShape`, and
`weight_rows`, which names its tensors. Called by the model loader and the model runner; knows
nothing of files, of the scheduler or of where cache rows lie.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.attention.layer import Attention
from vllm.batch import AttentionState, ForwardBatch
from vllm.cache_spec import LayerCacheSpec
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.weight_place import PackedModule
from vllm.model_executor.models.block_context import BlockContext
from vllm.model_executor.models.blocks import DecoderBlock
from vllm.model_executor.models.delta import Delta, add_and_norm, spread
from vllm.model_executor.models.fused_run import Stage, make_stages
from vllm.model_executor.models.rope_set import RopeSet
from vllm.model_executor.models.shapes import ModelShape
from vllm.model_executor.models.weight_map import LoadReport, WeightRow, expand_rows, load_weights
from vllm.types import DType

_IGNORED = (
    (r".*\.rotary_emb\.inv_freq", "rotary frequencies are computed from the config"),
    (r".*\.(masked_bias|attn\.bias)", "causal masks are not stored"),
)
_TIED_HEAD = (
    (
        r"lm_head\.weight",
        "the config ties the output matrix to the embedding (tie_word_embeddings)",
    ),
)


class CausalLM(nn.Module, ABC):
    """Embedding, decoder blocks, final norm and output matrix.

    Args:
        config: the checkpoint's config, normalised by `transformers_utils/config.py`.
        dtype: element type of weights and activations.
        tp: the ranks that share the model.
        cache_dtype: element type of K and V in the cache; None is `dtype`.
        max_model_len: longest sequence that is served; None is max_position_embeddings.
    """

    weight_rows: ClassVar[tuple[WeightRow, ...]]
    ignored_weights: ClassVar[tuple[tuple[str, str], ...]] = _IGNORED
    weight_renames: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        tp: TensorParallel,
        cache_dtype: DType | None = None,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__()
        shape = self.read_shape(config)
        self.shape = shape
        self._embed_scale = torch.tensor(shape.embed_scale, dtype=dtype, device="cpu").item()
        self._ropes = RopeSet(
            max_positions=shape.max_positions, max_model_len=max_model_len or shape.max_positions
        )
        context = BlockContext(
            hidden_size=shape.hidden_size,
            norm_epsilon=shape.norm_epsilon,
            has_unit_offset_norm=shape.has_unit_offset_norm,
            has_post_norms=shape.has_post_norms,
            dtype=dtype,
            cache_dtype=cache_dtype,
            tp=tp,
            ropes=self._ropes,
            has_float_norm=shape.has_float_norm,
            residual_scale=shape.residual_scale,
        )
        sizes = (shape.vocab_size, shape.hidden_size)
        self.embed = VocabParallelEmbedding(*sizes, dtype=dtype, tp=tp)
        self.blocks = tuple(
            DecoderBlock(index, layer, context) for index, layer in enumerate(shape.layers)
        )
        self.layers = nn.ModuleList(self.blocks)
        self._attention = {
            index: block.kernel_layer
            for index, block in enumerate(self.blocks)
            if block.kernel_layer is not None
        }
        self._is_fused = False
        self._stages: dict[int, tuple[Stage, ...]] = {}
        self._stage_kernels: tuple[str | None, ...] = ()
        self.norm = context.make_norm(shape.hidden_size)
        self.lm_head = None if shape.is_tied else ParallelLMHead(*sizes, dtype=dtype, tp=tp)
        self.logits = LogitsProcessor(
            shape.vocab_size, tp=tp, scale=shape.logit_scale, soft_cap=shape.logit_cap
        )

    @staticmethod
    @abstractmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """Return the shape that a config describes; ConfigError if this family cannot be it."""

    def cache_specs(self) -> tuple[LayerCacheSpec, ...]:
        """See TextModel."""
        return tuple(block.spec for block in self.blocks)

    def attention_layers(self) -> Mapping[int, Attention]:
        """See TextModel."""
        return self._attention

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> LoadReport:
        """See TextModel."""
        ignored = self.ignored_weights + (_TIED_HEAD if self.shape.is_tied else ())
        targets = expand_rows(self.weight_rows, self)
        return load_weights(targets, weights, ignored, self.weight_renames)

    def finish_loading(self, *, is_fused: bool = True) -> None:
        """See TextModel.

        Args:
            is_fused: whether runs of layers may become one op; the results are the same bits.
        """
        self._is_fused = is_fused
        # Packed weights lie behind one another in memory: in the order in which a step reads them.
        for module in (*self.layers.modules(), self.lm_head or self.embed):
            if isinstance(module, PackedModule):
                module.pack()

    def forward(self, batch: ForwardBatch, attention: AttentionState) -> Tensor:
        """See TextModel."""
        self._ropes.reserve(batch.max_seq_len)
        residual_TE = self.embed_tokens(batch.input_ids)
        if batch.kept_rows is not None or batch.cut is not None:
            return self._forward_cut(residual_TE, batch, attention)
        delta: Delta | None = None
        for stage in self.plan_stages():
            delta, residual_TE = stage(delta, residual_TE, batch, attention)
        return add_and_norm(self.norm, delta, residual_TE)

    def _forward_cut(
        self, residual_TE: Tensor, batch: ForwardBatch, attention: AttentionState
    ) -> Tensor:
        """Run the layers, each for the tokens that somebody needs it for; see TextModel.

        Behind the last mixer those are the kept ones, which spares prompts the last MLP: 3 % of
        their time where there are 28 layers. Cuts spare models with windows in their last layers
        most of these.
        """
        num_tokens, cuts = len(residual_TE), list[Tensor]()
        last = max(i for i, block in enumerate(self.blocks) if block.attention is not None)
        first = last if batch.cut is None else batch.cut.layer
        delta: Delta | None = None
        for stage in self._plan_beginning(first):
            delta, residual_TE = stage(delta, residual_TE, batch, attention)
        for i, block in enumerate(self.blocks[first:], start=first):
            cut = batch.cut if batch.cut is not None and batch.cut.layer == i else None
            tokens_L = None if cut is None else cut.tokens
            if i == last:
                tokens_L = batch.kept_rows
            delta = block.mix(delta, residual_TE, batch, attention, tokens_L)
            if tokens_L is not None:
                residual_TE = residual_TE[tokens_L]
            if not len(residual_TE):
                break
            if cut is not None:
                assert cut.batch is not None and attention.behind_cut is not None
                cuts.append(cut.tokens)
                batch, attention = cut.batch, attention.behind_cut
            delta, residual_TE = block.run_mlp(delta, residual_TE)
        hidden_TE = add_and_norm(self.norm, delta, residual_TE) if len(residual_TE) else residual_TE
        return hidden_TE if batch.kept_rows is not None else spread(hidden_TE, cuts, num_tokens)

    def plan_stages(self) -> tuple[Stage, ...]:
        """Return what a step runs in turn; made anew when a layer is bound to another kernel."""
        return self._plan_beginning(len(self.blocks))

    def _plan_beginning(self, num_layers: int) -> tuple[Stage, ...]:
        """Return the stages of the first layers."""
        kernels = tuple(layer.kernel for layer in self._attention.values())
        if kernels != self._stage_kernels:
            self._stages, self._stage_kernels = {}, kernels
        stages = self._stages.get(num_layers)
        if stages is None:
            blocks = self.blocks[:num_layers]
            stages = self._stages[num_layers] = make_stages(blocks) if self._is_fused else blocks
        return stages

    def take_layers(self, layers: Sequence[int]) -> CausalLM:
        """Return a model of some of the layers, which shares what they hold.

        Its steps mean nothing, but they launch what these layers launch.
        """
        part = copy.copy(self)
        part.blocks = tuple(self.blocks[layer] for layer in layers)
        part._stages = {}
        return part

    def embed_tokens(self, ids_T: Tensor) -> Tensor:
        """Return the scaled embeddings that the first layer reads, [T, E]."""
        embeddings_TE = self.embed(ids_T)
        if self._embed_scale == 1.0:
            return embeddings_TE
        return embeddings_TE * self._embed_scale

    def compute_logits(self, hidden_LE: Tensor) -> Tensor:
        """See TextModel."""
        head = self.embed if self.lm_head is None else self.lm_head
        return self.logits(head, hidden_LE)
