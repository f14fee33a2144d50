"""Executors: the ways to run the ranks of a model; `make_executor` picks one by the config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import EngineConfig
    from vllm.executor.abstract import Executor


def make_executor(config: EngineConfig) -> Executor:
    """Start the ranks that `config` asks for and load the model on each.

    Raises:
        ConfigError: the parallelism is not served by this version.
        VllmError: loading failed on a rank.
    """
    parallel = config.parallel_config
    backend = parallel.distributed_executor_backend
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size} is not served by this "
            "version; allowed: 1. Use --tensor-parallel-size to spread a model over ranks"
        )
    if backend not in (None, "mp"):
        raise ConfigError(
            f"distributed_executor_backend={backend!r} is not served by this version; "
            "allowed: 'mp', or unset"
        )
    if parallel.tensor_parallel_size > 1 or backend == "mp":
        from vllm.executor.multiproc_executor import MultiprocExecutor  # noqa: PLC0415

        return MultiprocExecutor(config)
    from vllm.executor.inproc_executor import InprocExecutor  # noqa: PLC0415  torch only if used

    return InprocExecutor(config)
