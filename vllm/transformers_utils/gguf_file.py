"""The header of a GGUF file: metadata, and where each tensor lies.

Called by the config, tokenizer and weight readers of GGUF files. Reads the header through a memory
map, skips what is not asked for (a vocabulary of 262,144 strings is decoded on demand only), and
knows about files split into parts. Never reads tensor data and imports neither numpy nor torch.
Source of the layout: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm.errors import WeightError
from vllm.transformers_utils.gguf_tensor import GGUF_TYPES, GGUFTensor

GGUF_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_MAX_NAME_BYTES = 1 << 16
_MAX_DIMS = 8
# Shorter arrays (head counts per layer, rotary sections) are read at once, longer ones on demand.
_EAGER_ARRAY_LEN = 1024

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ArrayPlace:
    """A long array of the header, to be read when asked for."""

    item_type: int
    length: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    """The header of one file, or of all parts of a split model as if they were one.

    Attributes:
        path: the file, or the first part.
        metadata: scalars, strings and short arrays by key. Long arrays: `array()`.
        tensors: by name, in file order.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    arrays: dict[str, _ArrayPlace] = field(repr=False)

    @property
    def architecture(self) -> str:
        """The file's own name of the model family, e.g. "llama"."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of this architecture's own section, e.g. get("block_count")."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def array(self, key: str) -> list[Any]:
        """Read an array, long or short; an empty list if the file has none of this name."""
        if key in self.metadata:
            return list(self.metadata[key])
        place = self.arrays.get(key)
        if place is None:
            return []
        with _Mapped(self.path) as data:
            return _Cursor(data, self.path, place.offset_bytes).items(place.item_type, place.length)

    def array_len(self, key: str) -> int:
        """Number of items of an array; 0 if the file has none of this name."""
        if key in self.metadata:
            return len(self.metadata[key])
        place = self.arrays.get(key)
        return place.length if place else 0


def is_gguf_file(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a file that starts as a GGUF file does."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == GGUF_MAGIC
    except OSError:
        return False


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read the header of a model; the first part of a split model stands for all of them.

    Raises:
        WeightError: not a GGUF file, a broken header, data beyond the end of the file, a missing
            part, or a part that is not the first.
    """
    first = _read_one(Path(path))
    count = int(first.metadata.get("split.count", 1))
    index = int(first.metadata.get("split.no", 0))
    if count <= 1:
        return first
    parts = _part_paths(first.path, index, count)
    if index != 0:
        raise WeightError(
            f"{first.path} is part {index + 1} of a model split into {count} files. "
            f"Give the first part: {parts[0]}"
        )
    missing = [str(p) for p in parts if not p.exists()]
    if missing:
        raise WeightError(
            f"{first.path} is the first of {count} parts; missing are: {', '.join(missing)}"
        )
    tensors = dict(first.tensors)
    for part in parts[1:]:
        for name, tensor in _read_one(part).tensors.items():
            if name in tensors:
                raise WeightError(
                    f"Tensor {name!r} is both in {tensors[name].path} and in {part}: the parts are "
                    "of different models. Fetch them again from one source."
                )
            tensors[name] = tensor
    expected = first.metadata.get("split.tensors.count")
    if expected is not None and int(expected) != len(tensors):
        raise WeightError(
            f"{first.path}: the {count} parts hold {len(tensors)} tensors together, "
            f"but the first part promises {expected}. Fetch the parts again from one source."
        )
    return replace(first, tensors=tensors)


def _part_paths(path: Path, index: int, count: int) -> list[Path]:
    match = _SPLIT_NAME.match(path.name)
    if not match or int(match["part"]) != index + 1 or int(match["count"]) != count:
        raise WeightError(
            f"{path} is part {index + 1} of {count} of a split model, but its name does not end in "
            f"-{index + 1:05d}-of-{count:05d}.gguf, so the other parts cannot be found. Rename it."
        )
    stem = match["stem"]
    return [path.with_name(f"{stem}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]


class _Mapped:
    """A read-only memory map of a file, closed at the end of the block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> mmap.mmap:
        with open(self._path, "rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise WeightError(f"{self._path} is empty, not a GGUF file.") from None
        return self._map

    def __exit__(self, *exc: object) -> None:
        self._map.close()


class _Cursor:
    """Reads values one after another; running off the end is a WeightError."""

    def __init__(self, data: mmap.mmap, path: Path, offset_bytes: int = 0) -> None:
        self._data, self._path, self.offset_bytes = data, path, offset_bytes

    def truncated(self) -> WeightError:
        """Return the error for a header that ends too early or makes no sense."""
        return WeightError(
            f"{self._path}: broken or truncated GGUF header near byte {self.offset_bytes} "
            f"(the file has {len(self._data)} bytes). Fetch the file again."
        )

    def scalar(self, layout: struct.Struct) -> Any:
        """Read one number of fixed size."""
        try:
            (value,) = layout.unpack_from(self._data, self.offset_bytes)
        except struct.error:
            raise self.truncated() from None
        self.offset_bytes += layout.size
        return value

    def string(self) -> str:
        """Read a length and that many bytes of UTF-8."""
        length = self.scalar(_U64)
        start = self.offset_bytes
        if length > len(self._data) - start:
            raise self.truncated()
        self.offset_bytes = start + length
        return self._data[start : start + length].decode("utf-8", errors="replace")

    def items(self, item_type: int, length: int) -> list[Any]:
        """Read the items of an array."""
        if item_type == _STRING:
            return [self.string() for _ in range(length)]
        if item_type == _ARRAY:
            return [self.items(self.scalar(_U32), self.scalar(_U64)) for _ in range(length)]
        width = self._scalar_layout(item_type).size
        layout = self._scalar_layout(item_type).format.lstrip("<")
        if length * width > len(self._data) - self.offset_bytes:
            raise self.truncated()
        values = struct.unpack_from(f"<{length}{layout}", self._data, self.offset_bytes)
        self.offset_bytes += length * width
        return list(values)

    def skip_items(self, item_type: int, length: int) -> None:
        """Step over the items of an array."""
        if item_type == _ARRAY:
            self.items(item_type, length)
        elif item_type == _STRING:
            self._skip_strings(length)
        else:
            self.offset_bytes += length * self._scalar_layout(item_type).size
        if self.offset_bytes > len(self._data):
            raise self.truncated()

    def value(self, value_type: int) -> Any:
        """Read one value of any type but an array."""
        return (
            self.string() if value_type == _STRING else self.scalar(self._scalar_layout(value_type))
        )

    def _skip_strings(self, length: int) -> None:
        data, unpack, end = self._data, _U64.unpack_from, len(self._data)
        offset = self.offset_bytes
        for _ in range(length):
            if offset + 8 > end:
                raise self.truncated()
            offset += 8 + unpack(data, offset)[0]
        self.offset_bytes = offset

    def _scalar_layout(self, value_type: int) -> struct.Struct:
        layout = _SCALARS.get(value_type)
        if layout is None:
            raise self.truncated()
        return layout


def _read_one(path: Path) -> GGUFFile:
    """Read the header of one file, without looking for other parts."""
    with _Mapped(path) as data:
        if data[:4] != GGUF_MAGIC:
            raise WeightError(
                f"{path} is not a GGUF file: it starts with {data[:4]!r}, not b'GGUF'."
            )
        cursor = _Cursor(data, path, 4)
        version = cursor.scalar(_U32)
        if version not in (2, 3):
            raise WeightError(
                f"{path}: GGUF version {version}; versions 2 and 3 (little endian) can be read."
            )
        num_tensors, num_values = cursor.scalar(_U64), cursor.scalar(_U64)
        metadata: dict[str, Any] = {}
        arrays: dict[str, _ArrayPlace] = {}
        for _ in range(num_values):
            _read_pair(cursor, metadata, arrays)
        entries = list(_read_entries(cursor, num_tensors))
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT)) or _DEFAULT_ALIGNMENT
        data_start = -(-cursor.offset_bytes // alignment) * alignment
        file_bytes = len(data)
    tensors = {
        name: GGUFTensor(
            name=name, shape=shape, type_id=type_id, path=path, offset_bytes=data_start + offset
        )
        for name, shape, type_id, offset in entries
    }
    _check_extent(path, tensors, file_bytes)
    return GGUFFile(path=path, metadata=metadata, tensors=tensors, arrays=arrays)


def _read_pair(cursor: _Cursor, metadata: dict[str, Any], arrays: dict[str, _ArrayPlace]) -> None:
    key, value_type = cursor.string(), cursor.scalar(_U32)
    if value_type != _ARRAY:
        metadata[key] = cursor.value(value_type)
        return
    item_type, length = cursor.scalar(_U32), cursor.scalar(_U64)
    if length <= _EAGER_ARRAY_LEN:
        metadata[key] = cursor.items(item_type, length)
        return
    arrays[key] = _ArrayPlace(item_type=item_type, length=length, offset_bytes=cursor.offset_bytes)
    cursor.skip_items(item_type, length)


def _read_entries(cursor: _Cursor, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Yield (name, shape, type id, offset from the start of the data) of every tensor."""
    for _ in range(count):
        name = cursor.string()
        num_dims = cursor.scalar(_U32)
        if num_dims > _MAX_DIMS or len(name) > _MAX_NAME_BYTES:
            raise cursor.truncated()
        dims = [cursor.scalar(_U64) for _ in range(num_dims)]
        yield name, tuple(reversed(dims)), cursor.scalar(_U32), cursor.scalar(_U64)


def _check_extent(path: Path, tensors: dict[str, GGUFTensor], file_bytes: int) -> None:
    """Find the first tensor whose data the file does not hold in full."""
    for tensor in tensors.values():
        if tensor.type_id not in GGUF_TYPES:
            continue  # refused by name where it is read; it may be one that nobody needs
        end = tensor.offset_bytes + tensor.num_bytes
        if end > file_bytes:
            raise WeightError(
                f"{path} is truncated: tensor {tensor.name!r} ({tensor.type_name}, "
                f"{list(tensor.shape)}) needs bytes {tensor.offset_bytes} to {end}, "
                f"but the file ends at {file_bytes}. Fetch the file again."
            )
