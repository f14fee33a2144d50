"""What a checkpoint may and may not contain; case C32 for every family."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.models.compare import make_prompts
from tests.models.conftest import CheckpointSet
from tests.models.families import load_ours, make_reference, read_config
from tests.utils.paged_driver import PagedDriver
from vllm.distributed.parallel_state import TensorParallel
from vllm.errors import WeightError
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.weight_map import LoadReport

EVERY_CLASS = (
    "llama",
    "mistral_full",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen2_moe",
)


def load_report(
    config: Mapping[str, object], weights: Mapping[str, Tensor] | list[tuple[str, Tensor]]
) -> LoadReport:
    cls, _ = ModelRegistry.resolve_model_cls(config["architectures"])
    model = cls(config, dtype=torch.float32, tp=TensorParallel.single())
    return model.load_weights(weights.items() if isinstance(weights, Mapping) else weights)


def last_logits(config: Mapping[str, object], weights: Mapping[str, Tensor]) -> Tensor:
    cls, _ = ModelRegistry.resolve_model_cls(config["architectures"])
    model = cls(config, dtype=torch.float32, tp=TensorParallel.single())
    model.load_weights(weights.items())
    model.finish_loading()
    (logits,) = PagedDriver(model, kernel="torch").step({0: make_prompts((20,))[0]})
    return logits


def split_embedding(
    weights: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], Tensor]:
    rest = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    return rest, rest["model.embed_tokens.weight"]


@pytest.mark.parametrize("name", EVERY_CLASS)
def test_c32a_a_tied_model_ignores_an_output_matrix(name: str, checkpoints: CheckpointSet) -> None:
    made = checkpoints.get(name)
    config = {**made.config, "tie_word_embeddings": True}
    weights, embedding = split_embedding(made.weights)
    extra = {**weights, "lm_head.weight": torch.randn_like(embedding)}
    report = load_report(config, extra)
    assert "tie_word_embeddings" in report.ignored["lm_head.weight"]
    assert report.unused == ()
    assert torch.equal(last_logits(config, extra), last_logits(config, weights))


@pytest.mark.parametrize("name", EVERY_CLASS)
def test_c32b_an_untied_model_needs_its_output_matrix(
    name: str, checkpoints: CheckpointSet
) -> None:
    made = checkpoints.get(name)
    weights, _ = split_embedding(made.weights)
    with pytest.raises(WeightError, match=r"lacks 1 of .*'lm_head\.weight'"):
        load_report({**made.config, "tie_word_embeddings": False}, weights)


@pytest.mark.parametrize("name", EVERY_CLASS)
def test_c32c_a_tied_model_needs_its_embedding(name: str, checkpoints: CheckpointSet) -> None:
    made = checkpoints.get(name)
    weights, embedding = split_embedding(made.weights)
    del weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding
    with pytest.raises(WeightError, match=r"'model\.embed_tokens\.weight'.*lm_head\.weight"):
        load_report({**made.config, "tie_word_embeddings": True}, weights)


@pytest.mark.parametrize("name", EVERY_CLASS)
def test_every_tensor_of_a_checkpoint_is_used(name: str, checkpoints: CheckpointSet) -> None:
    made = checkpoints.get(name)
    report = load_report(made.config, made.weights)
    assert set(report.used) == set(made.weights)
    assert not report.ignored and not report.unused


@pytest.mark.parametrize("name", EVERY_CLASS)
def test_each_missing_tensor_is_named(name: str, checkpoints: CheckpointSet) -> None:
    made = checkpoints.get(name)
    for missing in list(made.weights)[::5]:
        rest = {key: tensor for key, tensor in made.weights.items() if key != missing}
        shape = str(list(made.weights[missing].shape))
        with pytest.raises(WeightError) as caught:
            load_report(made.config, rest)
        assert repr(missing) in str(caught.value) and shape in str(caught.value)


@pytest.mark.parametrize("name", ["llama_tied_biased", "mixtral", "gemma3"])
def test_each_wrong_shape_is_named_with_both_shapes(name: str, checkpoints: CheckpointSet) -> None:
    made = checkpoints.get(name)
    for wrong, tensor in list(made.weights.items())[::4]:
        cut = {**made.weights, wrong: tensor[:-1]}
        with pytest.raises(WeightError) as caught:
            load_report(made.config, cut)
        text = str(caught.value)
        assert repr(wrong) in text
        assert str(list(tensor.shape)) in text and str(list(tensor[:-1].shape)) in text


def test_a_quantised_tensor_is_refused(checkpoints: CheckpointSet) -> None:
    made = checkpoints.get("llama")
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(WeightError, match=f"{name}.*int8"):
        load_report(made.config, {**made.weights, name: made.weights[name].to(torch.int8)})


def test_a_tensor_that_comes_twice_is_refused(checkpoints: CheckpointSet) -> None:
    made = checkpoints.get("llama")
    twice = [*made.weights.items(), ("model.norm.weight", made.weights["model.norm.weight"])]
    with pytest.raises(WeightError, match=r"'model\.norm\.weight' comes twice"):
        load_report(made.config, twice)


def test_unknown_and_harmless_tensors_are_told_apart(checkpoints: CheckpointSet) -> None:
    made = checkpoints.get("llama")
    extra = {
        **made.weights,
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16),
        "model.layers.0.self_attn.q_proj.lora": torch.ones(2),
    }
    report = load_report(made.config, extra)
    assert list(report.ignored) == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert report.unused == ("model.layers.0.self_attn.q_proj.lora",)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_experts_in_one_tensor_load_as_well(name: str, checkpoints: CheckpointSet) -> None:
    """transformers 5 holds all experts of a layer in one tensor; some checkpoints are saved so."""
    made = checkpoints.get(name)
    fused = {k: v for k, v in made.reference.state_dict().items() if k != "unused"}
    assert any(key.endswith("experts.gate_up_proj") for key in fused)
    assert torch.equal(last_logits(made.config, fused), last_logits(made.config, made.weights))


def test_the_text_part_of_a_multimodal_checkpoint_loads(checkpoints: CheckpointSet) -> None:
    made = checkpoints.get("gemma3")
    for prefix in ("language_model.model.", "model.language_model."):
        whole = {name.replace("model.", prefix, 1): tensor for name, tensor in made.weights.items()}
        whole["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(4)
        whole["multi_modal_projector.mm_input_projection_weight"] = torch.ones(4)
        report = load_report(made.config, whole)
        assert len(report.used) == len(made.weights) and not report.unused
        assert len(report.ignored) == 2


def test_gemma_norms_are_folded_in_float32() -> None:
    """1 + w in bfloat16 would lose w altogether where it is small."""
    reference = make_reference("gemma3")
    weights = {name: tensor * 0 + 2.0**-10 for name, tensor in reference.state_dict().items()}
    weights.pop("lm_head.weight")
    model = load_ours(read_config(reference), weights, dtype=torch.bfloat16)
    assert model.norm.weight.dtype == torch.float32
    assert torch.equal(model.norm.weight, torch.full_like(model.norm.weight, 1 + 2.0**-10))


def test_plain_weights_are_gone_once_packed(checkpoints: CheckpointSet) -> None:
    made = checkpoints.get("mixtral")
    model = load_ours(made.config, made.weights)
    names = [name for name, _ in model.named_parameters()]
    assert all("norm" in name or name == "embed.weight" for name in names), names
