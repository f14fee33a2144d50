"""One tensor as it comes from a weight file: what every reader yields."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor and its name.

    Attributes:
        name: as Hugging Face checkpoints name it.
        tensor: may be a view of the file, valid until the next one is asked for.
        stored_bytes: bytes it takes in the file, for the progress bar.
    """

    name: str
    tensor: Tensor
    stored_bytes: int
