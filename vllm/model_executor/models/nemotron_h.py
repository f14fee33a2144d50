"""Nemotron-H: one part a layer (Mamba-2, attention, MLP or experts), in a pattern of its own.

Row of `models/table.py`. Attention has no positions; MLPs are two matrices with a squared ReLU.

Shapes: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vllm.errors import ConfigError
from vllm.hybrid.state_dtype import read_state_dtype
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba import Mamba2Sizes
from vllm.model_executor.layers.relu2_experts import Relu2Experts
from vllm.model_executor.layers.sigmoid_router import RouterSizes, SigmoidRouter
from vllm.model_executor.layers.state import require_silu
from vllm.model_executor.models.block_context import BlockContext
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.shapes import AttentionShape, LayerShape, ModelShape
from vllm.model_executor.models.state_parts import Mamba2Shape
from vllm.model_executor.models.weight_map import WeightRow
from vllm.model_executor.models.weight_rows import layer_row

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


class NemotronHForCausalLM(CausalLM):
    """Nemotron-H and Nemotron 3 Nano."""

    has_inner_state = True
    weight_rows = (
        WeightRow(source="model.embeddings", target="embed"),
        WeightRow(source="model.norm_f", target="norm"),
        WeightRow(source="lm_head", target="lm_head"),
        layer_row("norm", "input_norm"),
        layer_row("norm", "mlp_norm"),
        layer_row("mixer", "attention.heads"),
        layer_row("mixer.conv1d", "attention.conv"),
        layer_row("mixer.norm", "attention.norm"),
        layer_row("mixer.in_proj", "attention.in_proj"),
        layer_row("mixer.out_proj", "attention.out_proj"),
        layer_row("mixer.q_proj", "attention.qkv", "q"),
        layer_row("mixer.k_proj", "attention.qkv", "k"),
        layer_row("mixer.v_proj", "attention.qkv", "v"),
        layer_row("mixer.o_proj", "attention.out"),
        layer_row("mixer.up_proj", "mlp.up"),
        layer_row("mixer.down_proj", "mlp.down"),
        layer_row("mixer.gate", "mlp.router.linear"),
        layer_row("mixer.gate", "mlp.router.correction"),
        layer_row("mixer.experts.{e}.up_proj", "mlp.experts", "up"),
        layer_row("mixer.experts.{e}.down_proj", "mlp.experts", "down"),
        layer_row("mixer.shared_experts.up_proj", "mlp.shared.up"),
        layer_row("mixer.shared_experts.down_proj", "mlp.shared.down"),
        layer_row("mixer.fc1_latent_proj", "mlp.to_latent"),
        layer_row("mixer.fc2_latent_proj", "mlp.from_latent"),
    )
    ignored_weights = (
        *CausalLM.ignored_weights,
        (r"mtp\..*", "layers that draft several tokens at once are not served"),
    )
    weight_renames = ((r"backbone\.(.*)", r"model.\1"),)

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""
        if config["mlp_hidden_act"] != "relu2":
            raise ConfigError(
                f"mlp_hidden_act is {config['mlp_hidden_act']!r}; Nemotron-H is served with "
                "'relu2' only"
            )
        return ModelShape(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            max_positions=config["max_position_embeddings"],
            layers=tuple(_read_layer(config, kind) for kind in _read_pattern(config)),
            norm_epsilon=config["layer_norm_epsilon"],
            has_float_norm=True,
            is_tied=bool(config["tie_word_embeddings"]),
        )


def _read_pattern(config: Mapping[str, Any]) -> list[str]:
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds is None:
        kinds = [_LETTERS.get(letter, letter) for letter in config["hybrid_override_pattern"]]
    return list(kinds)


def _read_layer(config: Mapping[str, Any], kind: str) -> LayerShape:
    match kind:
        case "linear_attention" | "mamba":
            return LayerShape(attention=_read_mamba(config), mlp=None)
        case "full_attention" | "attention":
            return LayerShape(attention=_read_attention(config), mlp=None)
        case "mlp":
            mlp = Relu2MlpShape(
                inner_size=config["intermediate_size"], bias=bool(config["mlp_bias"])
            )
            return LayerShape(attention=None, mlp=mlp)
        case "moe":
            return LayerShape(attention=None, mlp=_read_moe(config))
    raise ConfigError(
        f"the pattern of layers has {kind!r}; allowed: linear_attention (M), full_attention (*), "
        "mlp (-), moe (E)"
    )


def _read_mamba(config: Mapping[str, Any]) -> Mamba2Shape:
    require_silu(config["mamba_hidden_act"], "mamba_hidden_act")
    return Mamba2Shape(
        sizes=Mamba2Sizes(
            num_heads=config["mamba_num_heads"],
            head_size=config["mamba_head_dim"],
            num_groups=config["n_groups"],
            state_size=config["ssm_state_size"],
            conv_taps=config["conv_kernel"],
            conv_bias=bool(config["use_conv_bias"]),
            proj_bias=bool(config["use_bias"]),
            dt_min=float(config["time_step_min"]),
            dt_max=float("inf"),
        ),
        state_dtype=read_state_dtype(config),
    )


def _read_attention(config: Mapping[str, Any]) -> AttentionShape:
    return AttentionShape(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        scale=config["head_dim"] ** -0.5,
        rope=None,
    )


def _read_moe(config: Mapping[str, Any]) -> Relu2MoeShape:
    return Relu2MoeShape(
        router=RouterSizes(
            num_experts=config["n_routed_experts"],
            num_chosen=config["num_experts_per_tok"],
            correction="e_score_correction_bias",
            renormalize=bool(config["norm_topk_prob"]),
            epsilon=1e-20,
            scale=float(config["routed_scaling_factor"]),
            num_groups=config["n_group"],
            num_chosen_groups=config["topk_group"],
            is_float=True,
        ),
        inner_size=config["moe_intermediate_size"],
        latent_size=config.get("moe_latent_size"),
        shared=Relu2MlpShape(
            inner_size=config["moe_shared_expert_intermediate_size"],
            bias=bool(config["mlp_bias"]),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Relu2MlpShape:
    """An MLP of two matrices with a squared ReLU."""

    inner_size: int
    bias: bool

    def build(self, layer: int, context: BlockContext) -> Relu2Mlp:
        """See PartShape."""
        return Relu2Mlp(self, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relu2MoeShape:
    """Experts of that kind and one that every token takes.

    Attributes:
        inner_size: inner size of one expert.
        latent_size: size that inputs are projected to before the experts, or None.
        shared: the expert that every token takes, on the inputs as they are.
    """

    router: RouterSizes
    inner_size: int
    latent_size: int | None
    shared: Relu2MlpShape

    def build(self, layer: int, context: BlockContext) -> Relu2Moe:
        """See PartShape."""
        return Relu2Moe(self, context)


class Relu2Mlp(nn.Module):
    """down(relu(up(x)) ** 2)."""

    def __init__(self, shape: Relu2MlpShape, context: BlockContext) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(
            context.hidden_size,
            shape.inner_size,
            bias=shape.bias,
            dtype=context.dtype,
            tp=context.tp,
            what="intermediate_size",
        )
        self.down = RowParallelLinear(
            shape.inner_size,
            context.hidden_size,
            bias=shape.bias,
            dtype=context.dtype,
            tp=context.tp,
            what="intermediate_size",
        )

    def forward(self, x_TE: Tensor) -> Tensor:
        """Return the contribution to the residual stream, [T, E]."""
        return self.down(self.up.multiply_relu2(x_TE))


class Relu2Moe(nn.Module):
    """Routed experts, in a latent space or not, and the shared one."""

    def __init__(self, shape: Relu2MoeShape, context: BlockContext) -> None:
        super().__init__()
        hidden_size, latent_size, dtype = context.hidden_size, shape.latent_size, context.dtype
        self._tp = context.tp
        self.router = SigmoidRouter(hidden_size, shape.router, dtype)
        self.experts = Relu2Experts(
            shape.router.num_experts,
            latent_size or hidden_size,
            shape.inner_size,
            dtype=dtype,
            tp=context.tp,
        )
        self.shared = Relu2Mlp(shape.shared, context)
        bias = shape.shared.bias
        self.to_latent: ReplicatedLinear | None = None
        self.from_latent: ReplicatedLinear | None = None
        if latent_size:
            self.to_latent = ReplicatedLinear(hidden_size, latent_size, bias=bias, dtype=dtype)
            self.from_latent = ReplicatedLinear(latent_size, hidden_size, bias=bias, dtype=dtype)

    def forward(self, x_TE: Tensor) -> Tensor:
        """Return the contribution of the chosen and the shared experts, [T, E]."""
        weights_TK, ids_TK = self.router(x_TE)
        inputs = x_TE if self.to_latent is None else self.to_latent(x_TE)
        routed = self._tp.all_reduce(self.experts(inputs, weights_TK, ids_TK))
        if self.from_latent is not None:
            routed = self.from_latent(routed)
        return routed + self.shared(x_TE)
