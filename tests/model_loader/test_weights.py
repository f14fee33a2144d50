"""Checkpoints as files: which are read, in what order, and what is said of broken ones."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.utils.fixtures_gguf import write_fx_gguf
from vllm.config import LoadConfig, ModelConfig
from vllm.errors import ConfigError, WeightError
from vllm.model_executor.model_loader.weight_files import find_weight_files
from vllm.model_executor.model_loader.weights import iterate_weights

Tensors = dict[str, Tensor]


def make_tensors(seed: int = 0, count: int = 5) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    return {
        f"layer.{i}.weight": torch.randn(7, 4 + i, generator=generator).to(dtypes[i % 3])
        for i in range(count)
    }


def read(model: Path, load_format: str = "auto", **load: Any) -> Tensors:
    config = ModelConfig(model=str(model), tokenizer="", max_model_len=8)
    load_config = LoadConfig(load_format=load_format, **load)
    weights = iterate_weights(config, load_config, torch.float32, use_tqdm=False)
    return {name: tensor.clone() for name, tensor in weights}


def assert_same(ours: Tensors, expected: Tensors) -> None:
    assert set(ours) == set(expected)
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def save_shards(directory: Path, tensors: Tensors, *, suffix: str = ".safetensors") -> list[Path]:
    """Write a tensor a file and an index, as save_pretrained does."""
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    index, paths = {}, []
    for i, (name, tensor) in enumerate(tensors.items()):
        path = directory / f"{stem}-{i + 1:05d}-of-{len(tensors):05d}{suffix}"
        if suffix == ".safetensors":
            save_file({name: tensor}, path)
        else:
            torch.save({name: tensor}, path)
        index[name] = path.name
        paths.append(path)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (directory / f"{stem}{suffix}.index.json").write_text(text)
    return paths


def test_one_safetensors_file(tmp_path: Path) -> None:
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(read(tmp_path), tensors)


def test_element_types_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        "f64": torch.ones(3, dtype=torch.float64),
        "i64": torch.arange(3),
        "i32": torch.arange(3, dtype=torch.int32),
        "u8": torch.arange(3, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(read(tmp_path), tensors)


def test_unaligned_data(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    text += b" " * ((1 - len(text)) % 8)
    data = len(text).to_bytes(8, "little") + text + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    assert read(tmp_path)["a"].tolist() == [1.5, -2.0]


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_with_an_index(suffix: str, tmp_path: Path) -> None:
    tensors = make_tensors()
    save_shards(tmp_path, tensors, suffix=suffix)
    assert_same(read(tmp_path), tensors)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_without_an_index(suffix: str, tmp_path: Path) -> None:
    tensors = make_tensors()
    save_shards(tmp_path, tensors, suffix=suffix)
    next(tmp_path.glob("*.json")).unlink()
    assert_same(read(tmp_path), tensors)


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_missing_shard_is_named(suffix: str, has_index: bool, tmp_path: Path) -> None:
    paths = save_shards(tmp_path, make_tensors(), suffix=suffix)
    paths[2].unlink()
    if not has_index:
        next(tmp_path.glob("*.json")).unlink()
    with pytest.raises(WeightError, match=rf"1 file\(s\).*missing.*{paths[2].name}"):
        read(tmp_path)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_tensor_that_its_shard_lacks_is_named(suffix: str, tmp_path: Path) -> None:
    save_shards(tmp_path, make_tensors(), suffix=suffix)
    index = next(tmp_path.glob("*.json"))
    content = json.loads(index.read_text())
    content["weight_map"]["extra.weight"] = content["weight_map"]["layer.1.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(WeightError, match=r"'extra\.weight' in .*-00002-of-00005"):
        read(tmp_path)


def test_the_index_decides_between_copies(tmp_path: Path) -> None:
    tensors = make_tensors(count=2)
    paths = save_shards(tmp_path, tensors)
    stale = {"layer.0.weight": torch.zeros(1), **{"layer.1.weight": tensors["layer.1.weight"]}}
    save_file(stale, paths[1])
    assert_same(read(tmp_path), tensors)


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    save_shards(tmp_path, make_tensors())
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightError, match=r"model\.safetensors\.index\.json is not an index"):
        read(tmp_path)


def test_safetensors_go_before_bin_before_pt(tmp_path: Path) -> None:
    for number, name in enumerate(("consolidated.00.pt", "pytorch_model.bin", "model.safetensors")):
        save = save_file if name.endswith("safetensors") else torch.save
        save({"a": torch.full((2,), float(number))}, tmp_path / name)
        assert read(tmp_path)["a"].tolist() == [number] * 2
    assert read(tmp_path, "pt")["a"].tolist() == [1.0, 1.0]
    assert read(tmp_path, "safetensors")["a"].tolist() == [2.0, 2.0]


def test_other_layouts_and_leftovers_are_left_out(tmp_path: Path) -> None:
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({"tok.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    assert_same(read(tmp_path), tensors)
    torch.save({"a": torch.ones(1)}, tmp_path / "x.bin")
    for name in ("training_args.bin", "optimizer.bin", "scheduler.bin"):
        (tmp_path / name).write_bytes(b"not weights")
    assert set(read(tmp_path, "pt")) == {"a"}


def test_ignore_patterns(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "b.safetensors")
    assert set(read(tmp_path, ignore_patterns=("b*",))) == {"a"}


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "pt"])
def test_no_weights_at_all(load_format: str, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"holds no weights.*dummy"):
        read(tmp_path, load_format)


def test_formats_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'npcache'.*safetensors.*dummy"):
        find_weight_files(str(tmp_path), "npcache")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        read(tmp_path, "gguf")
    with pytest.raises(ConfigError, match="is a GGUF file"):
        read(write_fx_gguf(tmp_path / "fx.gguf"), "safetensors")
    assert len(read(tmp_path / "fx.gguf", "gguf")) == 20


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1, -100])
def test_truncated_safetensors(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(make_tensors(), path)
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    expected = r"tensor 'layer\.\d\.weight'.*ends at" if keep < 0 else "model.safetensors"
    with pytest.raises(WeightError, match=expected):
        read(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F4_X", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": "2", "data_offsets": 3},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        7,
    ],
)
def test_headers_that_make_no_sense(entry: Any, tmp_path: Path) -> None:
    text = json.dumps({"some.weight": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        read(tmp_path)


def test_a_bin_file(tmp_path: Path) -> None:
    tensors = make_tensors()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert_same(read(tmp_path), tensors)


def test_a_bin_file_of_before_zip(tmp_path: Path) -> None:
    tensors = make_tensors()
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    assert_same(read(tmp_path), tensors)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["EVIL_DIRECTORY"],)


def test_a_bin_file_that_would_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVIL_DIRECTORY", str(tmp_path / "evil"))
    torch.save({"a": torch.zeros(2), "b": _Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"pytorch_model\.bin holds more than tensors"):
        read(tmp_path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [({"a": 3}, "'a' is a int"), ([torch.zeros(1)], "holds a list"), (None, "truncated")],
)
def test_bin_files_of_another_kind(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(content or make_tensors(), path)
    if content is None:
        path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(WeightError, match=message):
        read(tmp_path)


def test_progress_shows_tensors_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a": torch.zeros(3, 1024), "b": torch.zeros(1024)}, tmp_path / "model.safetensors")
    config = ModelConfig(model=str(tmp_path), tokenizer="", max_model_len=8)
    list(iterate_weights(config, LoadConfig(), torch.float32, use_tqdm=True))
    shown = capsys.readouterr().err
    assert "Loading weights (2 tensors): 100%" in shown and "16.0k/16.0k" in shown
    list(iterate_weights(config, LoadConfig(), torch.float32, use_tqdm=False))
    assert not capsys.readouterr().err


def test_pages_are_given_back(tmp_path: Path) -> None:
    """Reading 256 MiB of tensors one by one takes far less memory than that."""
    tensors = {f"t{i}": torch.full((4 << 20,), float(i)) for i in range(16)}
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    before = resident_bytes()
    most = 0
    config = ModelConfig(model=str(tmp_path), tokenizer="", max_model_len=8)
    for i, (_, tensor) in enumerate(
        iterate_weights(config, LoadConfig(), torch.float32, use_tqdm=False)
    ):
        assert tensor[::1000].max() == tensor.sum() / tensor.numel() == float(tensor[0]), i
        most = max(most, resident_bytes() - before)
    assert most < 80 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
