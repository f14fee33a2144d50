"""The header of a safetensors file: which tensors it holds and where.

Called by dtype.py and by the weight reader. Checks that the file is whole, so that a truncated
download is reported by tensor. Never reads tensor data and imports neither numpy nor torch.
Source of the layout: the safetensors format description (8 bytes of length, JSON, data).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.errors import WeightError

_MAX_HEADER_BYTES = 100_000_000
_LENGTH = struct.Struct("<Q")
_ITEMSIZE = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeTensor:
    """Where one tensor lies.

    Attributes:
        type_name: element type as the file names it, e.g. "BF16".
        offset_bytes: from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    path: Path
    offset_bytes: int
    num_bytes: int


def read_safetensors(path: Path) -> dict[str, SafeTensor]:
    """Return the tensors of a file by name, in the order of their data.

    Raises:
        WeightError: not a safetensors file, or one that ends too early or contradicts itself.
    """
    file_bytes = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(_LENGTH.size)
        header_bytes = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        if not 0 < header_bytes <= _MAX_HEADER_BYTES:
            raise WeightError(f"{path} is not a safetensors file. Fetch it again.")
        text = file.read(header_bytes)
    if len(text) < header_bytes:
        raise WeightError(
            f"{path} is truncated: its header takes {header_bytes} bytes, but the whole file has "
            f"{file_bytes}. Fetch it again."
        )
    try:
        entries = json.loads(text)
        tensors = [
            _make_tensor(path, name, entry, _LENGTH.size + header_bytes)
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(
            f"{path}: the safetensors header makes no sense ({error!r}). Fetch the file again."
        ) from None
    tensors.sort(key=lambda tensor: tensor.offset_bytes)
    for tensor in tensors:
        _check_extent(tensor, file_bytes)
    return {tensor.name: tensor for tensor in tensors}


def _make_tensor(path: Path, name: str, entry: dict[str, Any], data_start: int) -> SafeTensor:
    start, end = entry["data_offsets"]
    return SafeTensor(
        name=name,
        shape=tuple(int(size) for size in entry["shape"]),
        type_name=entry["dtype"],
        path=path,
        offset_bytes=data_start + int(start),
        num_bytes=int(end) - int(start),
    )


def _check_extent(tensor: SafeTensor, file_bytes: int) -> None:
    what = f"tensor {tensor.name!r} ({tensor.type_name}, {list(tensor.shape)})"
    itemsize = _ITEMSIZE.get(tensor.type_name)
    if itemsize is not None and math.prod(tensor.shape) * itemsize != tensor.num_bytes:
        raise WeightError(
            f"{tensor.path}: {what} should take {math.prod(tensor.shape) * itemsize} bytes, but "
            f"the header gives it {tensor.num_bytes}. Fetch the file again."
        )
    end = tensor.offset_bytes + tensor.num_bytes
    if end > file_bytes:
        raise WeightError(
            f"{tensor.path} is truncated: {what} needs bytes {tensor.offset_bytes} to {end}, but "
            f"the file ends at {file_bytes}. Fetch it again."
        )
