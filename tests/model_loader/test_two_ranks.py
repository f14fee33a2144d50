"""Both ranks' shards of one checkpoint, loaded in one process (case C37)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.model_loader.fake_rank import FakeRank
from tests.utils.fixtures_gguf import build_fx_model, write_fx_gguf
from vllm.config import LoadConfig, ModelConfig
from vllm.model_executor.model_loader import load_model
from vllm.transformers_utils.config import get_config
from vllm.types import DType

VOCAB = 330  # no multiple of 64, nor of two times 64


def write_checkpoint(form: str, directory: Path, *, is_tied: bool) -> Path:
    options = {"vocab_size": VOCAB, "num_key_value_heads": 2, "tie_word_embeddings": is_tied}
    if form == "gguf":
        return write_fx_gguf(directory / "fx.gguf", **options)
    build_fx_model(**options).save_pretrained(directory)
    return directory


def load_rank(path: Path, rank: int, size: int) -> nn.Module:
    config = ModelConfig(
        model=str(path),
        tokenizer="",
        hf_config=get_config(str(path)),
        dtype=DType.FLOAT32,
        max_model_len=64,
    )
    load_config = LoadConfig(use_tqdm=False)
    return load_model(config, load_config, torch.device("cpu"), FakeRank(rank, size))


def rank_logits(model: nn.Module, hidden_LE: Tensor) -> Tensor:
    """Return a rank's columns of the logits, the padding included."""
    head = model.embed if model.lm_head is None else model.lm_head
    return head.multiply(hidden_LE, None)


@pytest.mark.parametrize(("form", "is_tied"), [("dir", True), ("dir", False), ("gguf", True)])
def test_c37_shards_of_a_vocabulary_that_needs_padding(
    form: str, is_tied: bool, tmp_path: Path
) -> None:
    path = write_checkpoint(form, tmp_path, is_tied=is_tied)
    whole = load_rank(path, 0, 1)
    ranks = [load_rank(path, rank, 2) for rank in range(2)]
    hidden_LE = torch.randn(1000, 128, generator=torch.Generator().manual_seed(0))
    expected = rank_logits(whole, hidden_LE)[:, :VOCAB]
    joined = torch.cat([rank_logits(model, hidden_LE) for model in ranks], dim=1)
    torch.testing.assert_close(joined[:, :VOCAB], expected, rtol=0, atol=1e-4)
    assert not joined[:, VOCAB:].any() and joined.shape[1] % 128 == 0
    ids = torch.arange(VOCAB)
    looked_up = sum(model.embed.look_up(ids) for model in ranks)
    assert torch.equal(looked_up, whole.embed.look_up(ids))


@pytest.mark.parametrize("form", ["dir", "gguf"])
def test_halves_of_the_layers_add_up(form: str, tmp_path: Path) -> None:
    path = write_checkpoint(form, tmp_path, is_tied=True)
    reference = build_fx_model(vocab_size=VOCAB, num_key_value_heads=2)
    weights = reference.model.layers[1]
    x_TE = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    layers = [load_rank(path, rank, 2).layers[1] for rank in range(2)]
    q, k, v = zip(
        *(layer.attention.qkv(x_TE).split((64, 64, 64), -1) for layer in layers), strict=True
    )
    for parts, name in ((q, "q_proj"), (k, "k_proj"), (v, "v_proj")):
        expected = F.linear(x_TE, getattr(weights.self_attn, name).weight)
        torch.testing.assert_close(torch.cat(parts, -1), expected, rtol=0, atol=1e-5)
    halves = [layer.mlp.activation(layer.mlp.gate_up(x_TE)) for layer in layers]
    sums = sum(layer.mlp.down.multiply(h, None) for layer, h in zip(layers, halves, strict=True))
    torch.testing.assert_close(sums, weights.mlp(x_TE), rtol=0, atol=1e-5)
