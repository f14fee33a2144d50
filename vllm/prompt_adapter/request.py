"""The request for a prompt adapter. They are not served: giving one to an engine is an error."""

from __future__ import annotations

import msgspec


class PromptAdapterRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Names a prompt adapter, as in 0.6.3."""

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str
    prompt_adapter_num_virtual_tokens: int
