"""Errors that a user may see.

Every message says what was given, what is allowed and what to do. Raised on all floors; the HTTP
layer turns them into OpenAI error objects, the CLI into one line on stderr.
"""

from __future__ import annotations


class VllmError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(VllmError, ValueError):
    """A flag, a field or a combination of them cannot be served."""


class RequestError(VllmError, ValueError):
    """One request is wrong; only that request fails.

    Attributes:
        param: name of the offending request field, or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class WeightError(VllmError, ValueError):
    """A weight file is truncated, incomplete or does not fit the model."""


class OutOfMemoryError(VllmError, MemoryError):
    """Something that was asked for does not fit into the memory there is."""


class ShapeError(VllmError, ValueError):
    """An op was given a tensor of the wrong rank, shape, stride, dtype or device."""


class KernelError(VllmError, RuntimeError):
    """A compiled extension is missing or broken, or no kernel can serve a layer."""


class EngineDeadError(VllmError, RuntimeError):
    """The engine has ended; every open and every later request gets this."""
