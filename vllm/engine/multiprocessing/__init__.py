"""0.6.3's names of the engine that runs in a process of its own.

The work is done by `AsyncLLMEngine` over `engine/client.py`; `vllm serve` uses that directly.
"""

from vllm.engine.multiprocessing.client import MQLLMEngineClient
from vllm.engine.multiprocessing.engine import MQLLMEngine, run_mp_engine
from vllm.errors import EngineDeadError

MQEngineDeadError = EngineDeadError

__all__ = ["MQEngineDeadError", "MQLLMEngine", "MQLLMEngineClient", "run_mp_engine"]
