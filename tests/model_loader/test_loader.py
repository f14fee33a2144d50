"""From a model's path to a module that runs: every family, both kinds of file, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.model_loader.fake_rank import FakeRank
from tests.models.compare import make_prompts, reference_logits
from tests.models.families import FAMILIES, make_reference
from tests.utils.fixtures_gguf import build_fx_model, write_fx_gguf, write_gguf
from tests.utils.paged_driver import PagedDriver
from tests.utils.tiny_engine import LIKE_TRAINED
from vllm.config import LoadConfig, ModelConfig
from vllm.distributed.parallel_state import TensorParallel
from vllm.errors import ConfigError, OutOfMemoryError, WeightError
from vllm.model_executor.model_loader import get_model_architecture, load_model, loader
from vllm.model_executor.models.weight_map import LoadReport
from vllm.platforms import MemoryInfo
from vllm.transformers_utils.config import get_config
from vllm.types import DType

CPU = torch.device("cpu")
PROMPT = make_prompts((150,))[0]


def load(
    model: Path, *, dtype: DType = DType.FLOAT32, load_format: str = "auto", **config: Any
) -> nn.Module:
    model_config = ModelConfig(
        model=str(model),
        tokenizer=str(model),
        hf_config={**get_config(str(model)), **config},
        dtype=dtype,
        max_model_len=256,
    )
    load_config = LoadConfig(load_format=load_format, use_tqdm=False, dummy=LIKE_TRAINED)
    return load_model(model_config, load_config, CPU, TensorParallel.single())


def run(model: nn.Module) -> Tensor:
    (logits,) = PagedDriver(model, kernel="torch").step({0: PROMPT}, all_logits=True)
    return logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_directory_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    reference = make_reference(name)
    reference.save_pretrained(tmp_path)
    logits = run(load(tmp_path))
    torch.testing.assert_close(logits, reference_logits(reference, PROMPT), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["llama", "mistral_window", "qwen2", "qwen3", "gemma", "gemma2", "mixtral"]
)
def test_a_gguf_file_gives_the_logits_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    reference = make_reference(name)
    if name == "gemma2":  # a file cannot tell another scale than the size's own
        reference.config.query_pre_attn_scalar = 32
        for layer in reference.model.layers:
            layer.self_attn.scaling = 32**-0.5
    reference.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    path = write_gguf(tmp_path / "model.gguf", reference.config.to_dict(), weights)
    logits = run(load(path))
    torch.testing.assert_close(logits, reference_logits(reference, PROMPT), rtol=0, atol=1e-4)


class TestRotaryFactors:
    """Case C34, to the logits."""

    settings = {  # noqa: RUF012 - read only
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }

    @staticmethod
    def factors() -> np.ndarray:
        """What a converter writes for these settings: default over scaled frequencies."""
        plain = build_fx_model().model.rotary_emb.inv_freq
        scaled = build_fx_model(
            rope_parameters=TestRotaryFactors.settings
        ).model.rotary_emb.inv_freq
        return (plain / scaled).numpy().astype(np.float32)

    def test_ones(self, tmp_path: Path) -> None:
        extra = {"rope_freqs.weight": np.ones(32, np.float32)}
        logits = run(load(write_fx_gguf(tmp_path / "ones.gguf", extra=extra)))
        assert torch.equal(logits, run(load(write_fx_gguf(tmp_path / "plain.gguf"))))
        expected = reference_logits(build_fx_model(), PROMPT)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)

    def test_real_factors(self, tmp_path: Path) -> None:
        extra = {"rope_freqs.weight": self.factors()}
        logits = run(load(write_fx_gguf(tmp_path / "factors.gguf", extra=extra)))
        expected = reference_logits(build_fx_model(rope_parameters=self.settings), PROMPT)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        ones = reference_logits(build_fx_model(), PROMPT)
        assert (logits[100:] - ones[100:]).abs().max() > 1e-2

    def test_unknown_tensors_are_listed(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        extra = {"blk.0.strange.weight": np.ones(4, np.float32)}
        load(write_fx_gguf(tmp_path / "fx.gguf", extra=extra))
        (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
        assert "1 tensor(s)" in record.message and "blk.0.strange.weight" in record.message


def test_parts_of_a_gguf_file_give_the_same_logits(tmp_path: Path) -> None:
    """Case C35."""
    whole = run(load(write_fx_gguf(tmp_path / "whole.gguf")))
    parts = run(load(write_fx_gguf(tmp_path / "parts.gguf", split_max_tensors=9)))
    assert torch.equal(parts, whole)


class TestTiedOutput:
    """Case C32, to the file."""

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        build_fx_model().save_pretrained(tmp_path)
        return tmp_path

    @staticmethod
    def rewrite(checkpoint: Path, weights: dict[str, Tensor], *, is_tied: bool) -> None:
        save_file(weights, checkpoint / "model.safetensors")
        config = json.loads((checkpoint / "config.json").read_text())
        config["tie_word_embeddings"] = is_tied
        (checkpoint / "config.json").write_text(json.dumps(config))

    def test_tied_with_an_output_matrix(
        self, checkpoint: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        weights = load_file(checkpoint / "model.safetensors")
        expected = run(load(checkpoint))
        weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
        self.rewrite(checkpoint, weights, is_tied=True)
        caplog.set_level("INFO")
        assert torch.equal(run(load(checkpoint)), expected)
        assert "1 tensor(s) not needed: the config ties" in caplog.text

    def test_untied_without_one(self, checkpoint: Path) -> None:
        self.rewrite(checkpoint, load_file(checkpoint / "model.safetensors"), is_tied=False)
        with pytest.raises(WeightError, match=r"lm_head\.weight"):
            load(checkpoint)

    def test_tied_without_the_embedding(self, checkpoint: Path) -> None:
        weights = load_file(checkpoint / "model.safetensors")
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
        self.rewrite(checkpoint, weights, is_tied=True)
        with pytest.raises(WeightError, match=r"model\.embed_tokens\.weight"):
            load(checkpoint)


def test_c33_large_weights_survive_in_bfloat16(tmp_path: Path) -> None:
    """1e5 is more than float16 can hold."""
    model = build_fx_model()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = 1e5
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert run(load(tmp_path, dtype=DType.BFLOAT16)).isfinite().all()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_converted_to_the_type_that_runs(stored: torch.dtype, tmp_path: Path) -> None:
    model = build_fx_model().to(stored)
    model.save_pretrained(tmp_path)
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        loaded = load(tmp_path, dtype=dtype)
        expected = model.model.norm.weight.float().to(getattr(torch, dtype.value))
        assert torch.equal(loaded.norm.weight.data, expected)


def test_dummy_weights_run(tmp_path: Path) -> None:
    build_fx_model().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    first, second = (
        run(load(tmp_path, load_format="dummy")),
        run(load(tmp_path, load_format="dummy")),
    )
    assert torch.equal(first, second) and first.isfinite().all() and first.std() > 1e-3


def test_a_model_that_does_not_fit_is_refused_before_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is not even a weight file: the size is known from the config alone."""
    config = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 40}))
    memory = MemoryInfo(total_bytes=4 << 30, free_bytes=2 << 30)
    platform = loader.get_platform("cpu")
    monkeypatch.setattr(type(platform), "get_memory", lambda self, index=0: memory)
    float32 = r"needs 1\d\.\d+ GiB .*float32.*2\.00 GiB of 4\.00"
    with pytest.raises(OutOfMemoryError, match=float32):
        load(tmp_path)
    with pytest.raises(OutOfMemoryError, match=r"needs [56]\.\d+ GiB .*bfloat16"):
        load(tmp_path, dtype=DType.BFLOAT16)


def test_ranks_on_one_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = nn.Linear(1 << 20, 1 << 8, device="meta")  # 1 GiB
    platform = loader.get_platform("cpu")
    config = ModelConfig(model="m", tokenizer="m", max_model_len=8, dtype=DType.FLOAT32)
    memory = MemoryInfo(total_bytes=8 << 30, free_bytes=3 << 30)
    monkeypatch.setattr(type(platform), "get_memory", lambda self, index=0: memory)
    assert loader.check_memory(skeleton, config, CPU, TensorParallel.single()) >> 30 == 1
    two = TensorParallel.single()
    two.size = 2
    with pytest.raises(OutOfMemoryError):
        loader.check_memory(skeleton, config, CPU, two)


def test_what_was_loaded_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    load(write_fx_gguf(tmp_path / "fx.gguf"))
    (line,) = [r.message for r in caplog.records if r.message.startswith("Loaded")]
    assert "LlamaForCausalLM" in line and "20 tensors" in line and "GiB of float32" in line


def test_one_rank_speaks_for_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {"strange": np.ones(4, np.float32)}
    path = write_fx_gguf(tmp_path / "fx.gguf", extra=extra, num_key_value_heads=2)
    config = ModelConfig(
        model=str(path), tokenizer="", hf_config=get_config(str(path)), max_model_len=64
    )
    for rank in range(2):
        load_model(config, LoadConfig(use_tqdm=False), CPU, FakeRank(rank, 2))
    assert len([r for r in caplog.records if "strange" in r.message]) == 1


def test_long_lists_of_unknown_tensors_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    names = tuple(f"x.{i}" for i in range(100))
    loader.log_report(LoadReport(used=(), ignored={}, unused=names), "m")
    assert "100 tensor(s)" in caplog.text and "x.19 and 80 more" in caplog.text


def test_threads_are_given_back(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    load(write_fx_gguf(tmp_path / "fx.gguf"))
    assert torch.get_num_threads() == 2
    (tmp_path / "none").mkdir()
    build_fx_model().config.save_pretrained(tmp_path / "none")
    with pytest.raises(WeightError):
        load(tmp_path / "none", architectures=["LlamaForCausalLM"])
    assert torch.get_num_threads() == 2


def test_an_architecture_that_is_not_served() -> None:
    config = ModelConfig(
        model="m", tokenizer="m", max_model_len=8, hf_config={"architectures": ["Nobody"]}
    )
    with pytest.raises(ConfigError, match=r"Nobody.*LlamaForCausalLM"):
        get_model_architecture(config)


def test_a_wrong_shape_names_both(tmp_path: Path) -> None:
    path = write_fx_gguf(tmp_path / "fx.gguf")
    with pytest.raises(WeightError, match=r"mlp\.gate_proj.*\[256, 128\].*\[300, 128\]"):
        load(path, intermediate_size=300)
