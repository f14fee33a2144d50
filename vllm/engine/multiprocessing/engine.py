"""0.6.3's engine end. Here the client starts its engine process itself: nothing is left to run."""

from __future__ import annotations

from typing import NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.errors import ConfigError
from vllm.usage.usage_lib import UsageContext

_REASON = (
    "the engine process is started by its client: use AsyncLLMEngine.from_engine_args(args, "
    "in_own_process=True)"
)


class MQLLMEngine:
    """Refuses to be made by hand."""

    @classmethod
    def from_engine_args(
        cls, engine_args: AsyncEngineArgs, usage_context: UsageContext, ipc_path: str
    ) -> NoReturn:
        """Raise ConfigError naming the way to go."""
        raise ConfigError(_REASON)


def run_mp_engine(
    engine_args: AsyncEngineArgs, usage_context: UsageContext, ipc_path: str
) -> NoReturn:
    """Raise ConfigError naming the way to go."""
    raise ConfigError(_REASON)
