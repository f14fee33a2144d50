"""The client under its 0.6.3 name."""

from __future__ import annotations

from vllm.config import EngineConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.engine.client import ProcessCore


class MQLLMEngineClient(AsyncLLMEngine):
    """An AsyncLLMEngine whose engine side is a process of its own, which it starts itself."""

    def __init__(self, ipc_path: str, engine_config: EngineConfig) -> None:
        """Start the engine process.

        Args:
            ipc_path: accepted; the sockets lie in a directory of their own under
                VLLM_RPC_BASE_PATH.
            engine_config: what to run.
        """
        super().__init__(engine_config, ProcessCore(engine_config))
        self.ipc_path = ipc_path

    @staticmethod
    def is_unsupported_config(engine_args: AsyncEngineArgs) -> bool:
        """Whether the arguments ask for what this client cannot run."""
        return engine_args.pipeline_parallel_size > 1

    async def setup(self) -> None:
        """Do nothing: the engine is ready once the client is made."""

    def close(self) -> None:
        """End the engine process."""
        self.shutdown()
