"""Names that nobody else has."""

from __future__ import annotations

import uuid


def random_uuid() -> str:
    """Return 32 random hexadecimal digits."""
    return uuid.uuid4().hex
