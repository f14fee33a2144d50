"""Parameters of an embedding request: accepted as data, not served by this engine."""

from __future__ import annotations

from typing import Any

import msgspec


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """Parameters of pooling.

    Attributes:
        additional_data: anything the pooling layer of the model wants.
    """

    additional_data: Any | None = None

    def clone(self) -> PoolingParams:
        """Return a copy."""
        return PoolingParams(additional_data=self.additional_data)
