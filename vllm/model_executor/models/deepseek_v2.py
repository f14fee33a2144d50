"""DeepSeek-V2: latent attention, and experts chosen within the best groups beside shared ones.

Row of `models/table.py`. What a token leaves in the cache is one compressed row for all heads, see
`layers/mla.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vllm._custom_ops.moe import ExpertChoice
from vllm.batch import AttentionState, ForwardBatch
from vllm.errors import ConfigError
from vllm.model_executor.layers.activation import resolve_gated_activation
from vllm.model_executor.layers.float_router import FloatRouter
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.latent_expansion import LatentSizes
from vllm.model_executor.layers.mla import LatentAttentionBlock, plan_latents
from vllm.model_executor.layers.shared_experts import hold_shared, run_with_choice
from vllm.model_executor.layers.weight_place import PackedModule
from vllm.model_executor.models.block_context import BlockContext
from vllm.model_executor.models.blocks import MlpBlock
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import read_mlp
from vllm.model_executor.models.llama import make_llama_shape
from vllm.model_executor.models.shapes import LayerShape, MlpShape, ModelShape
from vllm.model_executor.models.weight_rows import (
    MLP_ROWS,
    OUTER_ROWS,
    PRE_NORM_ROWS,
    layer_row,
)

GREEDY, GROUP_LIMITED = "greedy", "group_limited_greedy"


class DeepseekV2ForCausalLM(CausalLM):
    """DeepSeek-V2 and V2-Lite."""

    weight_rows = (
        *OUTER_ROWS,
        *PRE_NORM_ROWS,
        *MLP_ROWS,
        layer_row("self_attn.q_a_proj", "attention.query_down"),
        layer_row("self_attn.q_a_layernorm", "attention.query_norm"),
        layer_row("self_attn.q_b_proj", "attention.query_up"),
        layer_row("self_attn.kv_a_proj_with_mqa", "attention.latent_down"),
        layer_row("self_attn.kv_a_layernorm", "attention.latent_norm"),
        layer_row("self_attn.kv_b_proj", "attention.expansion"),
        layer_row("self_attn.o_proj", "attention.out"),
        layer_row("mlp.gate", "mlp.router"),
        layer_row("mlp.experts.{e}.gate_proj", "mlp.experts", "gate"),
        layer_row("mlp.experts.{e}.up_proj", "mlp.experts", "up"),
        layer_row("mlp.experts.{e}.down_proj", "mlp.experts", "down"),
        layer_row("mlp.shared_experts.gate_proj", "mlp.shared.gate_up", "gate"),
        layer_row("mlp.shared_experts.up_proj", "mlp.shared.gate_up", "up"),
        layer_row("mlp.shared_experts.down_proj", "mlp.shared.down"),
    )
    weight_renames = ((r"(.*\.self_attn)\.q_proj\.(.*)", r"\1.q_b_proj.\2"),)
    """Models without a rank for queries have one matrix, in the place of the second."""

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""
        attention = LatentAttentionShape(sizes=_read_sizes(config))

        def read_layer(layer: int) -> LayerShape:
            is_dense = layer < config["first_k_dense_replace"]
            return LayerShape(
                attention=attention, mlp=read_mlp(config) if is_dense else _read_moe(config)
            )

        return make_llama_shape(config, read_layer)

    def forward(self, batch: ForwardBatch, attention: AttentionState) -> Tensor:
        """See TextModel."""
        mixers = (block.attention for block in self.blocks)
        layers = [mixer for mixer in mixers if isinstance(mixer, LatentAttentionBlock)]
        return super().forward(batch, plan_latents(layers, batch, attention))


def _read_sizes(config: Mapping[str, Any]) -> LatentSizes:
    rope = config["rope_parameters"]
    nope, turning = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    scale = (nope + turning) ** -0.5
    growth = rope.get("mscale_all_dim")
    if rope["rope_type"] != "default" and growth and rope["factor"] > 1:
        # YaRN sharpens the softmax of long contexts, here by the logits and not by the rotation.
        scale *= (0.1 * growth * math.log(rope["factor"]) + 1.0) ** 2
    return LatentSizes(
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        query_rank=config.get("q_lora_rank"),
        latent=config["kv_lora_rank"],
        nope=nope,
        rope=turning,
        value=config["v_head_dim"],
        scale=scale,
        rope_settings=rope,
        bias=bool(config["attention_bias"]),
    )


def _read_moe(config: Mapping[str, Any]) -> GroupedMoeShape:
    method = config["topk_method"]
    if method not in (GREEDY, GROUP_LIMITED):
        raise ConfigError(
            f"topk_method {method!r} is not served by this family; allowed: {GREEDY}, "
            f"{GROUP_LIMITED}"
        )
    if config.get("norm_topk_prob"):
        raise ConfigError(
            "norm_topk_prob is true, which transformers and the published models of this family "
            "do not use; set it to false if the model was trained without it"
        )
    size = config["moe_intermediate_size"]
    is_grouped = method == GROUP_LIMITED
    return GroupedMoeShape(
        num_experts=config["n_routed_experts"],
        num_chosen=config["num_experts_per_tok"],
        num_groups=config["n_group"] if is_grouped else 1,
        num_chosen_groups=config["topk_group"] if is_grouped else 1,
        intermediate_size=size,
        shared_size=size * (config.get("n_shared_experts") or 0),
        activation=resolve_gated_activation(config["hidden_act"]),
        weight_scale=float(config["routed_scaling_factor"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionShape:
    """Multi-head latent attention; see PartShape."""

    sizes: LatentSizes

    def build(self, layer: int, context: BlockContext) -> nn.Module:
        """See PartShape."""
        rope = context.ropes.get(self.sizes.rope, self.sizes.rope_settings, is_neox=False)
        return LatentAttentionBlock(
            layer,
            self.sizes,
            rope,
            dtype=context.dtype,
            cache_dtype=context.cache_dtype,
            tp=context.tp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMoeShape:
    """A mixture whose tokens take experts of their best groups only; see PartShape.

    Attributes:
        num_chosen: experts that a token takes.
        num_groups, num_chosen_groups: groups of experts, and how many of them a token may use.
        shared_size: inner size of the expert that every token takes too; 0 is none.
        weight_scale: factor of the chosen experts' probabilities.
    """

    num_experts: int
    num_chosen: int
    num_groups: int
    num_chosen_groups: int
    intermediate_size: int
    shared_size: int
    activation: str
    weight_scale: float

    def build(self, layer: int, context: BlockContext) -> nn.Module:
        """See PartShape."""
        return GroupedMoeBlock(self, context)

    def make_choice(self, num_shared: int) -> ExpertChoice:
        """Return how experts are chosen, by an op that adds so many shared ones."""
        return ExpertChoice(
            num_experts=self.num_experts,
            num_groups=self.num_groups,
            num_chosen_groups=self.num_chosen_groups,
            num_shared=num_shared,
            scale=self.weight_scale,
        )


class GroupedMoeBlock(PackedModule):
    """A float32 router, its experts and the shared ones."""

    def __init__(self, shape: GroupedMoeShape, context: BlockContext) -> None:
        super().__init__()
        self._shape = shape
        self._tp = context.tp
        self.router = FloatRouter(context.hidden_size, shape.num_experts)
        self.experts = FusedMoE(
            shape.num_experts,
            shape.num_chosen,
            context.hidden_size,
            shape.intermediate_size,
            activation=shape.activation,
            renormalize=False,
            dtype=context.dtype,
            tp=context.tp,
            shared_size=shape.shared_size,
        )
        self.shared: MlpBlock | None = None
        if shape.shared_size:
            mlp = MlpShape(intermediate_size=shape.shared_size, activation=shape.activation)
            self.shared = MlpBlock(mlp, context, is_partial=True)

    def pack(self) -> None:
        """Make the shared experts some of the mixture's where that keeps them so; see FusedMoE."""
        if self.shared is not None and self.experts.num_shared:
            hold_shared(self.experts, self.shared.gate_up, self.shared.down)
            self.shared = None

    def forward(self, x_TE: Tensor) -> Tensor:
        """Return the contribution of the chosen and the shared experts, [T, E]."""
        logits_TN, shape = self.router(x_TE), self._shape
        if shape.num_groups == 1 and shape.weight_scale == 1.0 and not self.experts.num_shared:
            out_TE = self.experts(x_TE, logits_TN)
        elif logits_TN.is_cuda or self.experts.num_shared:
            choice = shape.make_choice(self.experts.num_shared)
            out_TE = run_with_choice(self.experts, x_TE, logits_TN, choice)
        else:
            weights_TK, ids_TK = choose_in_groups(logits_TN, shape)
            out_TE = self.experts.run_chosen(x_TE, weights_TK, ids_TK)
        if self.shared is not None:
            out_TE = out_TE + self.shared(x_TE)
        return self._tp.all_reduce(out_TE)


def choose_in_groups(logits_TN: Tensor, shape: GroupedMoeShape) -> tuple[Tensor, Tensor]:
    """Return weights (float32 [T, k]) and ids (int32 [T, k]) of each token's experts.

    The groups are ranked by their best expert.
    """
    scores_TN = logits_TN.softmax(dim=-1)
    if shape.num_groups > 1:
        scores_TGN = scores_TN.unflatten(-1, (shape.num_groups, -1))
        best_TC = scores_TGN.amax(dim=-1).topk(shape.num_chosen_groups, dim=-1).indices
        is_open_TG = torch.zeros_like(scores_TGN[:, :, 0], dtype=torch.bool)
        is_open_TG.scatter_(1, best_TC, True)
        scores_TN = scores_TGN.masked_fill(~is_open_TG[:, :, None], 0.0).flatten(1)
    chosen = scores_TN.topk(shape.num_chosen, dim=-1)
    return chosen.values * shape.weight_scale, chosen.indices.to(torch.int32)
