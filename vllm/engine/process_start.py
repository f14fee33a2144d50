"""What an engine process is told when it starts. Sent pickled through its stdin by its client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStart:
    """The beginning of an engine process.

    Attributes:
        directory: made by the client for the sockets; whoever ends last removes it.
        log_level: of the `vllm` logger.
    """

    config: EngineConfig
    directory: str
    log_level: int

    @property
    def input_address(self) -> str:
        """Where the client sends messages."""
        return f"ipc://{Path(self.directory) / 'input'}"

    @property
    def output_address(self) -> str:
        """Where the client receives reports."""
        return f"ipc://{Path(self.directory) / 'output'}"
