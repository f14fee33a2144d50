"""The request for an adapter. Adapters are not served: giving one to an engine is an error."""

from __future__ import annotations

import msgspec


class LoRARequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Names an adapter, as in 0.6.3."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    long_lora_max_len: int | None = None
    base_model_name: str | None = None

    @property
    def adapter_id(self) -> int:
        """The adapter's number."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.lora_name
