"""The seam between the engine and the workers.

An executor owns the ranks: it loads the model on each, learns what they need and have, lays out the
cache, and runs plans. The engine never sees a tensor; the workers never see a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vllm.cache_spec import CacheLayout, LayerCacheSpec
from vllm.step import StepOutput, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKernel:
    """The kernel that serves a layer, and why another that was asked for does not."""

    layer: int
    kernel: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank says after loading the model.

    Attributes:
        cache_specs: one for each decoder layer, sizes of this rank (heads already divided).
        cache_bytes: bytes that this rank can give to the cache.
        kernels: resolved kernel of each attention layer.
        block_tokens: block sizes in tokens that the kernels of all layers take.
        weight_bytes: bytes held by weights.
    """

    rank: int
    cache_specs: tuple[LayerCacheSpec, ...]
    cache_bytes: int
    kernels: tuple[LayerKernel, ...]
    block_tokens: tuple[int, ...]
    weight_bytes: int
    load_seconds: float


class Ticket(Protocol):
    """A submitted step."""

    def wait(self) -> StepOutput:
        """Block until the step is done; raises EngineDeadError with the cause if a rank died."""
        ...


class Executor(Protocol):
    """Runs plans on one or several ranks."""

    def reports(self) -> tuple[RankReport, ...]:
        """Return what every rank said after loading, in rank order."""
        ...

    def initialize_cache(self, layout: CacheLayout) -> None:
        """Allocate the arena of `layout` on every rank and bind it to the layers."""
        ...

    def submit(self, plan: StepPlan) -> Ticket:
        """Start one step on every rank."""
        ...

    def check_health(self) -> None:
        """Raise EngineDeadError, naming the rank and the cause, if one has ended."""
        ...

    def shutdown(self) -> None:
        """Free everything; safe to call twice."""
        ...
