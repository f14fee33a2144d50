"""One tensor of a GGUF file: its type, its shape and where it lies.

Made by `gguf_file.py`, read by the config, dtype and weight readers. Knows the sizes of blocks, not
how they are decoded: that is the gguf package's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from vllm.errors import WeightError


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFType:
    """An element type of the format: `block_len` elements take `block_bytes` bytes."""

    name: str
    block_len: int
    block_bytes: int


# Type ids that this project reads. Others exist; they are refused by name or number when met.
GGUF_TYPES: dict[int, GGUFType] = {
    ident: GGUFType(name=name, block_len=block_len, block_bytes=block_bytes)
    for ident, name, block_len, block_bytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (30, "BF16", 1, 2),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """Where one tensor lies.

    Attributes:
        shape: outermost dimension first, as torch shows it (the file has it the other way round).
        type_id: element type, a key of GGUF_TYPES if this project can read it.
        path: the file (the part, where the model is split) that holds it.
        offset_bytes: from the start of that file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    path: Path
    offset_bytes: int

    @property
    def num_elements(self) -> int:
        """Elements of the dequantised tensor."""
        return math.prod(self.shape)

    @property
    def type_name(self) -> str:
        """Name of the element type, or its number when it is not one that this project reads."""
        known = GGUF_TYPES.get(self.type_id)
        return known.name if known else f"type {self.type_id}"

    @property
    def num_bytes(self) -> int:
        """Bytes in the file; WeightError for an element type that this project does not read."""
        known = GGUF_TYPES.get(self.type_id)
        if known is None:
            names = ", ".join(t.name for t in GGUF_TYPES.values())
            raise WeightError(
                f"{self.path}: tensor {self.name!r} has element type {self.type_id}, which cannot "
                f"be read. Readable types: {names}. Convert the file to one of them."
            )
        if self.shape and self.shape[-1] % known.block_len:
            raise WeightError(
                f"{self.path}: tensor {self.name!r} has rows of {self.shape[-1]} elements, which "
                f"is no multiple of the {known.block_len} elements of a {known.name} block."
            )
        return self.num_elements // known.block_len * known.block_bytes
