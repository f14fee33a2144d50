"""Element types of checkpoints (case C33) and what a CPU makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.utils.fixtures_gguf import byte_vocabulary, write_fx_gguf, write_gguf
from vllm.errors import ConfigError, WeightError
from vllm.transformers_utils.dtype import checkpoint_dtype, normalize_dtype, resolve_dtype
from vllm.types import DType

BF16, F16, F32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32


def checkpoint(directory: Path, config: dict[str, Any], dtype: torch.dtype) -> DType | None:
    save_file(
        {"a": torch.zeros(40, 4, dtype=dtype), "b": torch.zeros(4)}, directory / "model.safetensors"
    )
    normalize_dtype(config)
    return checkpoint_dtype(config, directory)


@pytest.mark.parametrize(
    "config",
    [
        {"dtype": "bfloat16"},
        {"torch_dtype": None, "dtype": "bfloat16"},
        {"torch_dtype": "bfloat16"},
        {"torch_dtype": "torch.bfloat16"},
    ],
)
def test_c33_either_name_is_read(config: dict[str, Any], tmp_path: Path) -> None:
    assert checkpoint(tmp_path, config, torch.float32) is BF16


def test_c33_conflict_is_warned_of_and_dtype_wins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"torch_dtype": "float16", "dtype": "bfloat16"}
    assert checkpoint(tmp_path, config, torch.float32) is BF16
    assert "dtype 'bfloat16' and torch_dtype 'float16'" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_c33_neither_means_the_tensors_own_type(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = {torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32}[dtype]
    assert checkpoint(tmp_path, {}, dtype) is expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pickled_tensors_own_type(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(4, 4, dtype=dtype)}, tmp_path / "pytorch_model.bin")
    expected = {torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32}[dtype]
    assert checkpoint_dtype({}, tmp_path) is expected


def test_no_weights_no_type(tmp_path: Path) -> None:
    assert checkpoint_dtype({}, tmp_path) is None
    assert checkpoint_dtype({}, tmp_path / "nothing") is None


def test_gguf_types(tmp_path: Path) -> None:
    import gguf

    from tests.utils.fixtures_gguf import build_fx_model

    assert checkpoint_dtype({}, write_fx_gguf(tmp_path / "f32.gguf")) is F32
    model = build_fx_model()
    weights = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    for name, expected in (("F16", F16), ("BF16", BF16), ("Q8_0", BF16), ("Q4_1", BF16)):
        path = write_gguf(
            tmp_path / f"{name}.gguf",
            model.config.to_dict(),
            weights,
            quantization=gguf.GGMLQuantizationType[name],
            metadata=byte_vocabulary(320),
        )
        assert checkpoint_dtype({}, path) is expected


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save_file({"some.weight": torch.zeros(64, 64)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(WeightError, match=r"'some\.weight'"):
        checkpoint_dtype({}, tmp_path)


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "wide"])
def test_types_that_cannot_be_served(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*bfloat16"):
        checkpoint_dtype({"dtype": name}, tmp_path)


def test_float64_is_served_as_float32(tmp_path: Path) -> None:
    assert checkpoint_dtype({"dtype": "float64"}, tmp_path) is F32


@pytest.mark.parametrize(
    ("requested", "stored", "device", "expected"),
    [
        ("auto", F16, "cpu", BF16),
        ("auto", BF16, "cpu", BF16),
        ("auto", F32, "cpu", F32),
        ("auto", None, "cpu", BF16),
        ("half", F32, "cpu", BF16),
        ("float16", BF16, "cpu", BF16),
        ("float", BF16, "cpu", F32),
        ("float32", F16, "cpu", F32),
        ("bfloat16", F32, "cpu", BF16),
        ("auto", F16, "cuda", F16),
        ("auto", F32, "cuda", BF16),
        ("half", F32, "cuda", F16),
    ],
)
def test_what_runs(requested: str, stored: DType | None, device: str, expected: DType) -> None:
    assert resolve_dtype(requested, stored, device) is expected


def test_half_precision_on_a_cpu_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    from vllm import logger

    logger._said.clear()
    for _ in range(3):
        resolve_dtype("auto", F16, "cpu")
    assert caplog.text.count("bfloat16 is used") == 1


def test_an_unknown_request_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'fp8'.*auto"):
        resolve_dtype("fp8", BF16, "cpu")
