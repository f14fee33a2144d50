"""What an attention backend is: what it can serve, how it plans a step, how it runs a layer.

The selector asks `supports` once for each layer at load time; the model runner calls `plan` once a
step for each (group, kernel); `PagedAttention` calls `forward` for each layer. A backend never
looks at the scheduler, at other layers or at the environment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.batch import ForwardBatch, LayerCache
from vllm.types import DType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelQuery:
    """What a layer asks of a kernel.

    A field that is added later must have a default that asks for nothing: a backend without a rule
    for a field refuses every query in which that field differs from its default.

    Attributes:
        window: tokens that stay visible, the current one counted; 0 is all.
        sink_tokens: first tokens of a sequence that stay visible whatever the window.
        has_sink_logits: whether each head has a learned logit in the softmax denominator.
        chunk_tokens: length of the chunks that tokens attend within; 0 is none.
        soft_cap: c of c*tanh(x/c) on the scaled logits; 0 is none.
        block_tokens: tokens of a cache block.
        has_one_field: whether the cache has one field, of which a row is key and value at once.
        device: "cpu" or "cuda".
        capability: compute capability of a CUDA device, else None.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: DType
    kv_dtype: DType
    scale: float
    block_tokens: int = 16
    device: str = "cpu"
    capability: tuple[int, int] | None = None
    window: int = 0
    sink_tokens: int = 0
    has_sink_logits: bool = False
    chunk_tokens: int = 0
    soft_cap: float = 0.0
    has_one_field: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionParams:
    """The constants of one layer's attention; meanings as in KernelQuery.

    Attributes:
        sinks: float32 [num_heads], the learned logit of each head, or None.
        writes_cache: whether the layer stores the rows it is given; False where it reads the cache
            of another layer, and the new rows are that layer's.
    """

    scale: float
    window: int = 0
    sink_tokens: int = 0
    chunk_tokens: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    writes_cache: bool = True


Rule = Callable[[KernelQuery], bool | str]
"""Judges one field of a query: True if served, else False or the reason."""


GATHERED_FIELDS = (
    "num_kv_heads",
    "scale",
    "block_tokens",
    "window",
    "sink_tokens",
    "has_sink_logits",
    "chunk_tokens",
    "soft_cap",
    "has_one_field",
)
"""Fields that a kernel serves at any value if it finds rows by offset and masks them exactly."""


def serve_any(*names: str) -> dict[str, Rule]:
    """Return rules under which every value of these fields is served."""
    return dict.fromkeys(names, lambda query: True)


def judge_heads(query: KernelQuery) -> bool | str:
    """Rule of `num_heads`: each KV head serves the same number of heads."""
    return (
        query.num_heads % query.num_kv_heads == 0
        or f"{query.num_heads} heads do not divide by {query.num_kv_heads} KV heads"
    )


def find_refusal(query: KernelQuery, rules: Mapping[str, Rule]) -> str | None:
    """Judge every field of `query` by its rule; a field without a rule must have its default.

    Returns:
        None if every field is served, else the first reason.
    """
    for field in fields(query):
        value = getattr(query, field.name)
        rule = rules.get(field.name)
        if rule is None:
            if value != field.default:
                return f"{field.name}={value!r} is not known to it"
            continue
        verdict = rule(query)
        if isinstance(verdict, str):
            return verdict
        if not verdict:
            return f"{field.name}={value!r} is not served"
    return None


class AttentionBackend(ABC):
    """One kernel family. Stateless: instances are shared by all layers.

    Attributes:
        name: the name in tables, configs and reports.
        is_capturable: whether its decode steps never wait for the device, as CUDA graphs need.
    """

    name: ClassVar[str]
    is_capturable: ClassVar[bool] = True

    @abstractmethod
    def supports(self, query: KernelQuery) -> str | None:
        """Return None if this kernel serves `query`, else the reason why it does not."""

    def plan(self, batch: ForwardBatch, group: int) -> Any:
        """Compute once a step what every layer of `group` shares; None where nothing is needed."""
        return None

    @abstractmethod
    def forward(
        self,
        out_THD: Tensor,
        query_THD: Tensor,
        key_THD: Tensor | None,
        value_THD: Tensor | None,
        cache: LayerCache,
        batch: ForwardBatch,
        plan: Any,
        params: AttentionParams,
        *,
        rows_are_cached: bool = False,
    ) -> None:
        """Write the new K/V into the cache and attend.

        Args:
            out_THD: [T, H, D], written.
            query_THD: [T, H, D].
            key_THD: this step's keys [T, Hkv, D]. They are read from here, never from the cache,
                which need not have room for them (slots of -1). None takes them from the cache: a
                layer that reads another's, every row of which is stored.
            value_THD: new values, same.
            cache: the layer's views of the arena.
            batch: the step.
            plan: what `plan` returned for this batch and `cache.group`.
            params: the layer's constants.
            rows_are_cached: the new K/V are in the cache already; only attend.
        """
