"""Tensors of GGUF files: every block type, every family, both real models."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.families import make_reference
from tests.utils.fixtures_gguf import build_fx_model, write_fx_gguf, write_gguf
from vllm.errors import WeightError
from vllm.model_executor.model_loader.gguf import GGUFWeights, translate_name
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.gguf_file import read_gguf
from vllm.transformers_utils.gguf_tensor import GGUF_TYPES

_QUANTIZED = [kind.name for kind in GGUF_TYPES.values() if kind.block_len > 1]
_K_QUANTS = [name for name in _QUANTIZED if name.endswith("_K")]
_FAMILIES = (
    "llama",
    "llama_tied_biased",
    "mistral_window",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen2_moe_window",
)


def read_all(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tensors = {}
    for stored in GGUFWeights(read_gguf(path), dtype):
        assert stored.name not in tensors
        tensors[stored.name] = stored.tensor.clone()
    return tensors


def make_blocks(name: str, rows: int, columns: int) -> np.ndarray:
    """Random valid blocks: any bits are valid but the scales, which must be finite numbers."""
    kind = gguf.GGMLQuantizationType[name]
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (rows, columns // block_len, block_bytes), dtype=np.uint8)
    scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for place in scales.get(name, (0, 2) if name.endswith("_1") else (0,)):
        values = rng.normal(0, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, place : place + 2] = values[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write_matrix(path: Path, name: str, stored: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType[name]
    writer.add_tensor("blk.0.ffn_up.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference_values(name: str, stored: np.ndarray, columns: int) -> Tensor:
    """float32 values without the gguf package: transformers' own, or as the format is written."""
    from transformers.integrations.gguf.kernels import dequantize_blocks

    if name in ("Q5_0", "Q5_1"):  # transformers leaves these to the gguf package
        return torch.from_numpy(read_five_bits(stored, has_minimum=name == "Q5_1"))
    ident = int(gguf.GGMLQuantizationType[name])
    return dequantize_blocks(
        torch.from_numpy(stored), ident, len(stored), columns, torch.float32
    ).view(len(stored), columns)


def read_five_bits(stored: np.ndarray, *, has_minimum: bool) -> np.ndarray:
    """Q5_0: scale, 32 fifth bits, 16 bytes of two fours; Q5_1 has a minimum behind the scale."""
    head = 4 if has_minimum else 2
    blocks = stored.reshape(-1, head + 20)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    fifth = blocks[:, head : head + 4].copy().view("<u4")
    pairs = blocks[:, head + 4 :]
    low = np.concatenate([pairs & 15, pairs >> 4], axis=1).astype(np.int32)
    number = low + 16 * ((fifth >> np.arange(32, dtype=np.uint32)) & 1).astype(np.int32)
    if has_minimum:
        minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
        values = scale * number.astype(np.float32) + minimum
    else:
        values = scale * (number - 16).astype(np.float32)
    return values.reshape(len(stored), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", _QUANTIZED)
def test_random_blocks_of_every_type(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    rows, columns = 301, 1024  # several slices, the last one not full
    stored = make_blocks(name, rows, columns)
    (tensor,) = read_all(write_matrix(tmp_path / "m.gguf", name, stored), dtype).values()
    expected = reference_values(name, stored, columns)
    assert expected.isfinite().all() and expected.std() > 0
    assert tensor.shape == (rows, columns) and tensor.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)
    else:
        exact = gguf.dequantize(stored, gguf.GGMLQuantizationType[name])
        assert torch.equal(tensor, torch.from_numpy(exact).to(dtype))


@pytest.mark.parametrize("name", [n for n in _QUANTIZED if n not in _K_QUANTS])
def test_what_the_package_quantises(name: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(0, 0.1, (40, 96)).astype(np.float32)
    stored = gguf.quantize(values, gguf.GGMLQuantizationType[name])
    (tensor,) = read_all(write_matrix(tmp_path / "m.gguf", name, stored)).values()
    assert torch.equal(tensor, reference_values(name, stored, 96))
    bits = int(name[1])
    assert (tensor - torch.from_numpy(values)).abs().max() < 2.0 / 2**bits


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types_keep_their_own(name: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(0, 1, (5, 7)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[name]
    path = write_matrix(tmp_path / "m.gguf", name, gguf.quantize(values, kind))
    (tensor,) = read_all(path, torch.bfloat16).values()
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
    assert torch.equal(tensor, torch.from_numpy(values).to(dtype))


@pytest.mark.parametrize("name", _FAMILIES)
def test_a_family_comes_back_as_its_checkpoint(name: str, tmp_path: Path) -> None:
    reference = make_reference(name)
    reference.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    path = write_gguf(tmp_path / "model.gguf", reference.config.to_dict(), weights)
    tensors = read_all(path)
    assert set(tensors) == set(weights)
    for key, expected in weights.items():
        if "norm" in key and name.startswith("gemma"):  # 1 + w was rounded when it was written
            torch.testing.assert_close(tensors[key], expected, rtol=0, atol=1.2e-7)
        else:
            assert torch.equal(tensors[key], expected), key


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_rotary_rows_of_quantised_matrices(name: str, tmp_path: Path) -> None:
    """Rows are reordered as blocks, before they are dequantised."""
    reference = make_reference(name)
    reference.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(
        tmp_path / "model.gguf", reference.config.to_dict(), weights, quantization=kind
    )
    for key, tensor in read_all(path).items():
        assert (tensor - weights[key]).abs().max() < 5e-3, key


def test_parts_give_the_tensors_of_the_whole(tmp_path: Path) -> None:
    """Case C35."""
    whole = read_all(write_fx_gguf(tmp_path / "whole.gguf"))
    parts = read_all(write_fx_gguf(tmp_path / "parts.gguf", split_max_tensors=9))
    assert list(parts) == list(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_experts_of_old_files(tmp_path: Path) -> None:
    assert translate_name("llama", "blk.3.ffn_down.7.weight") == (
        "model.layers.3.block_sparse_moe.experts.7.w2.weight"
    )
    assert translate_name("qwen2", "blk.3.ffn_down.7.weight") == "blk.3.ffn_down.7.weight"


def test_unknown_tensors_keep_the_files_name(tmp_path: Path) -> None:
    """Case C34: rotary factors are settings, not weights; what is unknown is left to the report."""
    extra = {
        "rope_freqs.weight": np.ones(32, np.float32),
        "blk.0.strange.weight": np.ones(4, np.float32),
        "other": np.ones(4, np.float32),
    }
    names = set(read_all(write_fx_gguf(tmp_path / "fx.gguf", extra=extra)))
    assert {"blk.0.strange.weight", "other"} < names and "rope_freqs.weight" not in names
    assert len(names) == 22


def test_counts_for_the_progress_bar(tmp_path: Path) -> None:
    path = write_fx_gguf(tmp_path / "fx.gguf")
    weights = GGUFWeights(read_gguf(path), torch.float32)
    stored = list(weights)
    assert weights.num_tensors == len(stored) == 20
    model = build_fx_model()
    assert weights.total_bytes == sum(4 * p.numel() for p in model.parameters())
    assert sum(s.stored_bytes for s in stored) == weights.total_bytes


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = write_fx_gguf(tmp_path / "fx.gguf")
    header = read_gguf(path)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 100_000)
    with pytest.raises(WeightError, match="cut short"):
        list(GGUFWeights(header, torch.float32))


def test_smollm2_equals_transformers_reading_the_file(smollm2_gguf: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = get_config(str(smollm2_gguf))
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**{k: v for k, v in config.items() if k != "dtype"})
        )
    theirs = load_gguf_checkpoint(smollm2_gguf, return_tensors=True, model_to_load=skeleton)
    ours = read_all(smollm2_gguf)
    assert set(ours) == set(theirs["tensors"])
    for name, expected in theirs["tensors"].items():
        assert torch.equal(ours[name], expected), name


def test_gemma3_matrices_and_norms(gemma3_gguf: Path) -> None:
    """Some tensors of every block type; transformers takes half a minute for the whole file."""
    matrices = {
        "token_embd.weight": ("model.embed_tokens.weight", "Q8_0"),
        "blk.0.attn_q.weight": ("model.layers.0.self_attn.q_proj.weight", "Q5_0"),
        "blk.0.attn_output.weight": ("model.layers.0.self_attn.o_proj.weight", "Q4_K"),
        "blk.0.ffn_down.weight": ("model.layers.0.mlp.down_proj.weight", "Q6_K"),
        "blk.17.ffn_up.weight": ("model.layers.17.mlp.up_proj.weight", "Q5_0"),
    }
    norms = {
        "output_norm.weight": "model.norm.weight",
        "blk.5.attn_norm.weight": "model.layers.5.input_layernorm.weight",
        "blk.5.attn_q_norm.weight": "model.layers.5.self_attn.q_norm.weight",
        "blk.5.post_attention_norm.weight": "model.layers.5.post_attention_layernorm.weight",
        "blk.5.ffn_norm.weight": "model.layers.5.pre_feedforward_layernorm.weight",
        "blk.5.post_ffw_norm.weight": "model.layers.5.post_feedforward_layernorm.weight",
    }
    header = read_gguf(gemma3_gguf)
    data = np.memmap(gemma3_gguf, np.uint8, mode="r")
    ours = read_all(gemma3_gguf)
    assert len(ours) == len(header.tensors) == 236
    for stored_name, (name, kind) in matrices.items():
        entry = header.tensors[stored_name]
        raw = data[entry.offset_bytes :][: entry.num_bytes].reshape(entry.shape[0], -1)
        assert entry.type_name == kind and ours[name].shape == entry.shape
        expected = reference_values(kind, np.array(raw[-300:]), entry.shape[1])
        torch.testing.assert_close(ours[name][-300:], expected, rtol=1e-6, atol=1e-7)
    for stored_name, name in norms.items():
        entry = header.tensors[stored_name]
        raw = np.array(data[entry.offset_bytes :][: entry.num_bytes]).view(np.float32)
        assert torch.equal(ours[name], torch.from_numpy(raw) - 1.0)
        assert ours[name].abs().mean() > 0.1
