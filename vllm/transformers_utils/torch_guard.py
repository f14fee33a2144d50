"""Importing transformers without letting it import torch.

Used by the tokenizer and config loaders when they run in the API process, which must stay light.
Has no effect once torch or transformers is imported. Never hides anything from other code for
longer than the block it guards.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


class _NoTorchAdvice(logging.Filter):
    """Drops the advice to install torch that transformers logs when it finds none."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()


@contextmanager
def hide_torch(enabled: bool = True) -> Iterator[None]:
    """Make `import torch` fail inside the block, unless torch is imported already.

    transformers asks once whether torch exists and remembers the answer, so in a process that
    imports it inside this block it never imports torch later either.
    """
    if not enabled or "torch" in sys.modules:
        yield
        return
    advice = _NoTorchAdvice()
    library_logger = logging.getLogger("transformers")
    library_logger.addFilter(advice)
    modules = cast("dict[str, Any]", sys.modules)
    modules["torch"] = None
    try:
        yield
    finally:
        if modules.get("torch", advice) is None:
            del modules["torch"]
        library_logger.removeFilter(advice)
