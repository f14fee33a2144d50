"""Reads a checkpoint's tensors one after another, whatever files they lie in.

Called by `loader.py`; yields Hugging Face names and tensors for a model's `load_weights`. Holds one
tensor at a time beside the model, shows progress, and turns what can be wrong with a file into a
WeightError that names it. Never decides where a tensor goes.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from vllm.config import LoadConfig, ModelConfig
from vllm.errors import ConfigError, WeightError
from vllm.model_executor.model_loader.gguf import GGUFWeights
from vllm.model_executor.model_loader.mapped_file import MappedFiles, as_tensor
from vllm.model_executor.model_loader.stored_tensor import StoredTensor
from vllm.model_executor.model_loader.weight_files import WeightFiles, find_weight_files
from vllm.transformers_utils.gguf_file import is_gguf_file, read_gguf
from vllm.transformers_utils.safetensors_file import SafeTensor, read_safetensors

_TORCH_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def iterate_weights(
    model_config: ModelConfig, load_config: LoadConfig, dtype: torch.dtype, *, use_tqdm: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a checkpoint.

    Args:
        model_config: whose `model` names a directory, a GGUF file or a hub id.
        load_config: format and file choice; not "dummy".
        dtype: element type that quantised tensors are dequantised to; others keep their own.
        use_tqdm: whether to show a progress bar.

    Raises:
        WeightError: a file is missing, truncated, or holds what it should not.
        ConfigError: a load format that does not go with the model.
    """
    weights = _open(model_config, load_config, dtype)
    with tqdm(
        total=weights.total_bytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc=f"Loading weights ({weights.num_tensors} tensors)",
        mininterval=0.5,
        disable=not use_tqdm,
    ) as progress:
        for stored in weights:
            yield stored.name, stored.tensor
            progress.update(stored.stored_bytes)


def _open(
    model_config: ModelConfig, load_config: LoadConfig, dtype: torch.dtype
) -> GGUFWeights | SafetensorsWeights | PickledWeights:
    model, load_format = model_config.model, load_config.load_format
    if is_gguf_file(Path(model)):
        if load_format not in ("auto", "gguf"):
            raise ConfigError(
                f"{model} is a GGUF file; load_format {load_format!r} cannot read it."
            )
        return GGUFWeights(read_gguf(model), dtype)
    if load_format == "gguf":
        raise ConfigError(f"load_format is gguf, but {model} is not a GGUF file.")
    files = find_weight_files(
        model,
        load_format,
        revision=model_config.revision,
        download_dir=load_config.download_dir,
        ignore_patterns=load_config.ignore_patterns,
    )
    return SafetensorsWeights(files) if files.kind == "safetensors" else PickledWeights(files)


class SafetensorsWeights:
    """The tensors of safetensors files.

    Attributes:
        num_tensors: how many will be yielded.
        total_bytes: bytes of all of them.
    """

    def __init__(self, files: WeightFiles) -> None:
        self._tensors: list[SafeTensor] = []
        found: dict[str, Path] = {}
        for path in files.paths:
            for name, tensor in read_safetensors(path).items():
                if files.index.get(name, path.name) == path.name:
                    self._tensors.append(tensor)
                    found[name] = path
        _check_index(files, found)
        self.num_tensors = len(self._tensors)
        self.total_bytes = sum(tensor.num_bytes for tensor in self._tensors)

    def __iter__(self) -> Iterator[StoredTensor]:
        maps = MappedFiles()
        for entry in self._tensors:
            dtype = _TORCH_TYPES.get(entry.type_name)
            if dtype is None:
                raise WeightError(
                    f"{entry.path}: tensor {entry.name!r} has element type {entry.type_name}; "
                    f"readable are {', '.join(_TORCH_TYPES)}."
                )
            raw = maps.view(entry.path, entry.offset_bytes, entry.num_bytes)
            tensor = as_tensor(raw, dtype, entry.shape)
            yield StoredTensor(name=entry.name, tensor=tensor, stored_bytes=entry.num_bytes)
            maps.release(entry.path, entry.offset_bytes, entry.num_bytes)


class PickledWeights:
    """The tensors of .bin and .pt files, unpickled with nothing but tensors allowed.

    Attributes:
        num_tensors: how many the index promises; 0 if there is none, for only reading tells.
        total_bytes: bytes of the files.
    """

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self.num_tensors = len(files.index)
        self.total_bytes = sum(path.stat().st_size for path in files.paths)

    def __iter__(self) -> Iterator[StoredTensor]:
        found: dict[str, Path] = {}
        for path in self._files.paths:
            state = _unpickle(path)
            for name in list(state):
                if self._files.index.get(name, path.name) != path.name:
                    continue
                tensor = state.pop(name)  # its memory goes as soon as the model has copied it
                if not isinstance(tensor, Tensor):
                    raise WeightError(
                        f"{path}: {name!r} is a {type(tensor).__name__}, not a tensor; this is not "
                        "a file of plain weights."
                    )
                found[name] = path
                yield StoredTensor(
                    name=name, tensor=tensor, stored_bytes=tensor.numel() * tensor.element_size()
                )
        _check_index(self._files, found)


def _unpickle(path: Path) -> dict[str, Any]:
    """Read a dict of tensors, mapped into memory where the file's format allows it."""
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):  # files older than torch 1.6 cannot be mapped
                raise
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightError(
            f"{path} holds more than tensors, or is damaged, and is not read for safety: "
            f"{str(error).splitlines()[0]}. Convert it to safetensors."
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        raise WeightError(
            f"{path} is truncated or no torch file: {str(error).splitlines()[0]}. Fetch it again."
        ) from None
    if not isinstance(state, dict):
        raise WeightError(f"{path} holds a {type(state).__name__}; expected a dict of tensors.")
    return state


def _check_index(files: WeightFiles, found: Mapping[str, Path]) -> None:
    missing = [name for name in files.index if name not in found]
    if missing:
        raise WeightError(
            f"The index names {len(missing)} tensors that their files do not hold, first "
            f"{missing[0]!r} in {files.index[missing[0]]}. The files are of different versions; "
            "fetch the model again."
        )
