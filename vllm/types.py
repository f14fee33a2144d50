"""Element types and small enums shared by every floor.

Nothing here imports torch: the scheduler, the API process and the messages between processes name
element types with :class:`DType`; `vllm.utils.tensors` maps them to torch where tensors exist.
"""

from __future__ import annotations

from enum import Enum


class DType(str, Enum):
    """Element type of weights, activations or cache rows."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    UINT8 = "uint8"
    FLOAT8_E4M3 = "float8_e4m3"
    FLOAT8_E5M2 = "float8_e5m2"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.UINT8: 1,
    DType.FLOAT8_E4M3: 1,
    DType.FLOAT8_E5M2: 1,
}


class FinishReason(str, Enum):
    """Why a sequence ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
