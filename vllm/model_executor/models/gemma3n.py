"""Gemma 3n, text: four residual streams, inputs for each layer, last layers without own caches.

Row of `models/table.py`. The last `num_kv_shared_layers` layers attend to the keys and values of
the last earlier layer of their type. `gemma3n_parts.py` has the parts of a layer, `layers/altup.py`
what surrounds attention and MLP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vllm.batch import AttentionState, ForwardBatch
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.activation import resolve_gated_activation
from vllm.model_executor.layers.altup import StreamProjections
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.layers.weight_place import PackedModule
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import (
    FULL,
    SLIDING,
    check_layer_type,
    read_window,
)
from vllm.model_executor.models.gemma3n_parts import (
    FreshRows,
    Gemma3nLayer,
    SharedAttentionShape,
    SparseMlpShape,
)
from vllm.model_executor.models.shapes import AttentionShape, LayerShape, MlpShape, ModelShape
from vllm.model_executor.models.weight_map import WeightRow
from vllm.model_executor.models.weight_rows import (
    ATTENTION_ROWS,
    MLP_ROWS,
    OUTER_ROWS,
    SANDWICH_NORM_ROWS,
    layer_row,
)
from vllm.types import DType


def _side_row(source: str, target: str) -> WeightRow:
    return WeightRow(source=f"model.layers.{{i}}.{source}", target=f"sides.{{i}}.{target}")


def _stream_rows(source: str, target: str, num_streams: int) -> tuple[WeightRow, ...]:
    return tuple(
        WeightRow(source=f"model.{source}.{i}", target=f"{target}.matrices.{i}")
        for i in range(num_streams - 1)
    )


_MAX_STREAMS = 8  # rows of streams that a model does not have give nothing


class Gemma3nForCausalLM(CausalLM):
    """Gemma 3n (gemma3n_text)."""

    weight_rows = (
        *OUTER_ROWS,
        *ATTENTION_ROWS,
        *SANDWICH_NORM_ROWS,
        *MLP_ROWS,
        layer_row("self_attn.q_proj", "attention.query"),
        _side_row("altup", "altup"),
        _side_row("altup.router_norm", "altup.router_norm"),
        _side_row("altup.modality_router", "altup.modality_router"),
        _side_row("altup.prediction_coefs", "altup.prediction_coefs"),
        _side_row("altup.correction_coefs", "altup.correction_coefs"),
        _side_row("laurel.linear_left", "laurel.left"),
        _side_row("laurel.linear_right", "laurel.right"),
        _side_row("laurel.post_laurel_norm", "laurel.norm"),
        _side_row("per_layer_input_gate", "input_gate"),
        _side_row("per_layer_projection", "input_projection"),
        _side_row("post_per_layer_input_norm", "input_norm"),
        *_stream_rows("altup_projections", "split", _MAX_STREAMS),
        *_stream_rows("altup_unembed_projections", "join", _MAX_STREAMS),
        WeightRow(source="model.embed_tokens_per_layer", target="layer_embed"),
        WeightRow(source="model.per_layer_model_projection", target="layer_projection"),
        WeightRow(source="model.per_layer_projection_norm", target="layer_norm"),
    )
    ignored_weights = (
        *CausalLM.ignored_weights,
        (
            r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",
            "the text part of the model is served, not images or sounds",
        ),
        (
            r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*",
            "the layer reads the keys and values of an earlier layer (num_kv_shared_layers)",
        ),
    )
    weight_renames = ((r"model\.language_model\.(.*)", r"model.\1"),)

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        tp: TensorParallel,
        cache_dtype: DType | None = None,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__(
            config, dtype=dtype, tp=tp, cache_dtype=cache_dtype, max_model_len=max_model_len
        )
        hidden, epsilon = config["hidden_size"], config["rms_norm_eps"]
        num_layers, self._input_size = len(self.blocks), config["hidden_size_per_layer_input"]
        num_streams = config["altup_num_inputs"]
        self.sides = nn.ModuleList(Gemma3nLayer(block, config, dtype) for block in self.blocks)
        self._layer_stages = tuple(side for side in self.sides if isinstance(side, Gemma3nLayer))
        self.split = StreamProjections(num_streams, hidden, dtype)
        self.join = StreamProjections(num_streams, hidden, dtype)
        inputs = num_layers * self._input_size
        self._num_layer_ids = config["vocab_size_per_layer_input"]
        self.layer_embed = VocabParallelEmbedding(self._num_layer_ids, inputs, dtype=dtype, tp=tp)
        self.layer_projection = ReplicatedLinear(hidden, inputs, bias=False, dtype=dtype)
        self.layer_norm = RMSNorm(self._input_size, epsilon, torch.float32)
        self._layer_scales = tuple(
            torch.tensor(scale, dtype=dtype, device="cpu").item()
            for scale in (self._input_size**0.5, hidden**-0.5, 2.0**-0.5)
        )

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""
        owners = read_owners(config)
        return ModelShape(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            max_positions=config["max_position_embeddings"],
            layers=tuple(
                _read_layer(config, layer, owners.get(layer))
                for layer in range(config["num_hidden_layers"])
            ),
            norm_epsilon=config["rms_norm_eps"],
            has_float_norm=True,
            has_post_norms=True,
            embed_scale=config["hidden_size"] ** 0.5,
            is_tied=bool(config["tie_word_embeddings"]),
            logit_cap=float(config.get("final_logit_softcapping") or 0.0),
        )

    def finish_loading(self, *, is_fused: bool = True) -> None:
        """See TextModel; layers are never fused, their streams are none of the op's."""
        super().finish_loading(is_fused=False)
        for part in (self.sides, self.split, self.join, self.layer_projection):
            for module in part.modules():
                if isinstance(module, PackedModule):
                    module.pack()

    def forward(self, batch: ForwardBatch, attention: AttentionState) -> Tensor:
        """See TextModel."""
        self._ropes.reserve(batch.max_seq_len)
        embeddings_TE = self.embed_tokens(batch.input_ids)
        inputs_TLP = self._make_layer_inputs(batch.input_ids, embeddings_TE)
        streams_ATE = self.split.split(embeddings_TE)
        fresh: FreshRows = {}
        cut = batch.cut
        for layer, stage in enumerate(self._layer_stages):
            streams_ATE = stage(streams_ATE, inputs_TLP[:, layer], fresh, batch, attention)
            if cut is not None and cut.layer == layer:
                streams_ATE, inputs_TLP = streams_ATE[:, cut.tokens], inputs_TLP[cut.tokens]
                if cut.batch is None or attention.behind_cut is None:
                    return streams_ATE[0]
                fresh = dict.fromkeys(fresh, (None, None))  # they are cached by now
                batch, attention = cut.batch, attention.behind_cut
        if batch.kept_rows is not None:
            streams_ATE = streams_ATE[:, batch.kept_rows]
        return self.norm(self.join.join(streams_ATE))

    def take_layers(self, layers: Sequence[int]) -> CausalLM:
        """See CausalLM; all of them, which read what others have written."""
        return self

    def _make_layer_inputs(self, ids_T: Tensor, embeddings_TE: Tensor) -> Tensor:
        """Return what each layer is told of the tokens themselves, [T, layers, P]."""
        sizes = (-1, self._input_size)
        own_scale, projection_scale, sum_scale = self._layer_scales
        known_T = torch.where(ids_T < self._num_layer_ids, ids_T, 0)
        own_TLP = self.layer_embed(known_T).unflatten(-1, sizes) * own_scale
        projected_TLP = (self.layer_projection(embeddings_TE) * projection_scale).unflatten(
            -1, sizes
        )
        return (self.layer_norm.apply_in_place(projected_TLP) + own_TLP) * sum_scale


def read_owners(config: Mapping[str, Any]) -> dict[int, int]:
    """Return layer -> the layer whose keys and values it reads, for those without their own."""
    types = [
        check_layer_type(config, layer, FULL, SLIDING)
        for layer in range(config["num_hidden_layers"])
    ]
    num_owners = len(types) - config["num_kv_shared_layers"]
    last = {name: layer for layer, name in enumerate(types[:num_owners])}
    return {layer: last[types[layer]] for layer in range(num_owners, len(types))}


def _read_layer(config: Mapping[str, Any], layer: int, owner: int | None) -> LayerShape:
    bias = bool(config["attention_bias"])
    heads = AttentionShape(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        scale=1.0,
        rope=config["rope_parameters"][config["layer_types"][layer]],
        qkv_bias=bias,
        out_bias=bias,
        has_qk_norm=True,
        window=read_window(config, layer),
    )
    sizes = config["intermediate_size"]
    mlp = MlpShape(
        intermediate_size=sizes if isinstance(sizes, int) else sizes[layer],
        activation=resolve_gated_activation(config["hidden_activation"]),
    )
    pattern = config.get("activation_sparsity_pattern") or 0.0
    sparsity = pattern if isinstance(pattern, int | float) else pattern[layer]
    return LayerShape(
        attention=SharedAttentionShape(heads=heads, reads_from=owner),
        mlp=SparseMlpShape(mlp=mlp, sparsity=float(sparsity or 0.0)),
    )
