"""Checkpoints of the tiny fixture models, built once a session for tests of whole engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.utils.fixtures_models import (
    build_chain,
    build_chain_tokenizer,
    build_flat,
    build_reach,
    save_checkpoint,
)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}bot:{% endif %}"
)


class TinyModels:
    """Builds each model the first time that it is asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tokenizer = build_chain_tokenizer(CHAT_TEMPLATE)

    def tokenizer(self) -> Any:
        """A new tokenizer of FX-CHAIN, with a chat template that writes the BOS."""
        return build_chain_tokenizer(CHAT_TEMPLATE)

    def chain(self, table: Mapping[int, int] | None = None, **config: Any) -> Path:
        """FX-CHAIN with a look-up table; {} always ends at once, {65: 65} never."""
        key = {"table": sorted((table or {}).items()), **config}
        return self._get("chain", key, lambda: build_chain(table, **config))

    def loop(self) -> Path:
        """FX-CHAIN that says AAAA… for ever."""
        return self.chain({65: 65})

    def flat(self) -> Path:
        """FX-FLAT: every token is as likely as every other."""
        return self._get("flat", {}, build_flat)

    def reach(self, model_type: str = "llama", **config: Any) -> Path:
        """FX-REACH: a random model."""
        key = {"type": model_type, **config}
        return self._get("reach", key, lambda: build_reach(model_type, **config))

    def _get(self, name: str, key: Mapping[str, Any], build: Any) -> Path:
        digest = abs(hash(json.dumps(key, sort_keys=True, default=str)))
        path = self._root / f"{name}-{digest:x}"
        if not path.exists():
            save_checkpoint(build(), path, self._tokenizer)
        return path
