"""Element types: what a checkpoint says, what its tensors have, and what a machine runs.

Called by config.py and config/resolve.py. Reads config keys and the headers of weight files (JSON
of safetensors, GGUF headers, pickled storage names of .bin files), never tensor data, and no torch.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm.errors import ConfigError
from vllm.logger import init_logger, warn_once
from vllm.transformers_utils.gguf_file import GGUFFile, read_gguf
from vllm.transformers_utils.safetensors_file import read_safetensors
from vllm.types import DType

logger = init_logger(__name__)

_NAMES = {
    "float32": DType.FLOAT32,
    "float": DType.FLOAT32,
    "float16": DType.FLOAT16,
    "half": DType.FLOAT16,
    "bfloat16": DType.BFLOAT16,
}
_STORED = {"F32": DType.FLOAT32, "F16": DType.FLOAT16, "BF16": DType.BFLOAT16}
_PICKLED = {
    b"BFloat16Storage": DType.BFLOAT16,
    b"HalfStorage": DType.FLOAT16,
    b"FloatStorage": DType.FLOAT32,
}


def normalize_dtype(config: dict[str, Any]) -> None:
    """Fold `torch_dtype` (old name) and `dtype` (new name) into `dtype`: a name, or None.

    Where both are given and differ, `dtype` wins, with one warning.
    """
    old, new = _plain(config.pop("torch_dtype", None)), _plain(config.get("dtype"))
    if old and new and old != new:
        warn_once(
            logger,
            f"config.json has dtype {new!r} and torch_dtype {old!r}; dtype, the newer name, wins.",
        )
    config["dtype"] = new or old


def parse_dtype(name: str) -> DType:
    """Return the element type of a name as users and checkpoints write it.

    Raises:
        ConfigError: not a type that weights can be served in.
    """
    dtype = _NAMES.get(_plain(name) or "")
    if dtype is None:
        raise ConfigError(f"dtype {name!r} cannot be served. Allowed: auto, {', '.join(_NAMES)}.")
    return dtype


def checkpoint_dtype(config: Mapping[str, Any], path: Path) -> DType | None:
    """Return the element type that a checkpoint was saved in.

    What its (normalised) config says; else the type that most of its weights have. Quantised GGUF
    weights count as bfloat16, the type they are dequantised to. None if there are no weights.

    Raises:
        ConfigError: the config names a type that cannot be served.
        WeightError: a weight file is broken.
    """
    if config.get("dtype"):
        # Nobody trains in float64; such files are served in the next type there is.
        return DType.FLOAT32 if config["dtype"] == "float64" else parse_dtype(config["dtype"])
    if path.is_file():
        return _gguf_dtype(read_gguf(path))
    if not path.is_dir():
        return None
    shards = sorted(path.glob("*.safetensors"))
    if shards:
        return _most_common(_safetensors_types(shards))
    return _pickled_dtype(sorted(path.glob("*.bin")))


def resolve_dtype(requested: str, checkpoint: DType | None, device: str) -> DType:
    """Return the type to run in.

    auto keeps the checkpoint's type, with two exceptions that are logged once: float16 becomes
    bfloat16 on a CPU, float32 becomes bfloat16 on other devices. A float16 asked for by name on a
    CPU becomes bfloat16 as well: CPUs compute in bfloat16 or float32, and bfloat16 has the range.

    Args:
        requested: auto, float16, half, bfloat16, float, float32.
        checkpoint: from `checkpoint_dtype`; None counts as bfloat16.
        device: "cpu" or "cuda".
    """
    is_cpu = device == "cpu"
    if requested != "auto":
        dtype = parse_dtype(requested)
        if dtype is DType.FLOAT16 and is_cpu:
            warn_once(logger, "float16 is not computed on CPUs; bfloat16 is used instead.")
            return DType.BFLOAT16
        return dtype
    dtype = checkpoint or DType.BFLOAT16
    if dtype is DType.FLOAT16 and is_cpu:
        warn_once(logger, "The checkpoint is float16; bfloat16 is used on CPUs.")
        return DType.BFLOAT16
    if dtype is DType.FLOAT32 and not is_cpu:
        warn_once(logger, "The checkpoint is float32; bfloat16 is used. --dtype float32 keeps it.")
        return DType.BFLOAT16
    return dtype


def _plain(name: Any) -> str | None:
    """Return a dtype's bare name: "torch.bfloat16" and torch.bfloat16 alike become "bfloat16"."""
    return str(name).removeprefix("torch.") if name else None


def _most_common(counts: Counter[DType]) -> DType | None:
    return counts.most_common(1)[0][0] if counts else None


def _safetensors_types(shards: Iterable[Path]) -> Counter[DType]:
    """Count the elements of each type over the headers of safetensors files."""
    counts: Counter[DType] = Counter()
    for shard in shards:
        for tensor in read_safetensors(shard).values():
            dtype = _STORED.get(tensor.type_name)
            if dtype is not None:
                counts[dtype] += tensor.num_bytes // dtype.itemsize
    return counts


def _gguf_dtype(file: GGUFFile) -> DType | None:
    counts: Counter[DType] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) >= 2:
            counts[_STORED.get(tensor.type_name, DType.BFLOAT16)] += tensor.num_elements
    return _most_common(counts)


def _pickled_dtype(files: Iterable[Path]) -> DType | None:
    """Find the storage class that a torch.save archive names, without running its pickle."""
    for path in files:
        if not zipfile.is_zipfile(path):
            continue
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith("data.pkl"):
                    pickled = archive.read(name)
                    found = [d for storage, d in _PICKLED.items() if storage in pickled]
                    if found:
                        return found[0]
    return None
