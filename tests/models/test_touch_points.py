"""A new model is one file and one row: a toy family of others, loaded by the loader and run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.compare import make_prompts
from tests.utils.paged_driver import PagedDriver
from tests.utils.tiny_engine import LIKE_TRAINED
from vllm.config import LoadConfig, ModelConfig
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.model_loader.loader import load_model
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.types import DType

TOY_FILE = '''
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.shapes import AttentionShape, LayerShape, MlpShape, ModelShape
from vllm.model_executor.models.weight_rows import LLAMA_ROWS


class ToyForCausalLM(CausalLM):
    """No positions, heads that shrink with depth, a window on the first layer."""

    weight_rows = LLAMA_ROWS

    @staticmethod
    def read_shape(config):
        def make_layer(index):
            attention = AttentionShape(
                num_heads=4, num_kv_heads=2, head_size=32 + 8 * index, scale=0.2, rope=None,
                window=8 if index == 0 else 0,
            )
            return LayerShape(
                attention=attention, mlp=MlpShape(intermediate_size=48, activation="gelu")
            )

        return ModelShape(
            vocab_size=config["vocab_size"], hidden_size=64, max_positions=256,
            layers=tuple(make_layer(i) for i in range(3)), norm_epsilon=1e-5, is_tied=True,
        )
'''


@pytest.fixture
def toy_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "toy_family.py").write_text(TOY_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ModelRegistry, "_models", dict(ModelRegistry._models))
    ModelRegistry.register_model("ToyForCausalLM", "toy_family:ToyForCausalLM")
    return "ToyForCausalLM"


def test_a_model_of_others_needs_one_file_and_one_row(toy_name: str) -> None:
    config = ModelConfig(
        model="toy",
        tokenizer="toy",
        dtype=DType.FLOAT32,
        hf_config={"architectures": [toy_name], "vocab_size": 300},
        max_model_len=256,
    )
    model = load_model(
        config,
        LoadConfig(load_format="dummy", dummy=LIKE_TRAINED),
        torch.device("cpu"),
        TensorParallel.single(),
    )
    assert isinstance(model, CausalLM)
    assert [spec.fields[0].shape for spec in model.cache_specs()] == [(2, 32), (2, 40), (2, 48)]
    prompts = make_prompts((3, 40))
    driver = PagedDriver(model, kernel="cpu")
    whole = driver.generate(prompts, 8)
    chunked = driver.generate(prompts, 8, chunk_tokens=5)
    for one, other in zip(whole, chunked, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
