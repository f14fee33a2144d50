"""What travels between the caller's side of an engine and the side that runs the model.

Text, stop strings and users' objects stay on the caller's side; ids, limits, grammars and counts
cross. In process the same objects are handed over as they are; between processes they are msgpack,
one message a step. Imports no torch.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from vllm.sequence import SequenceRequest, SequenceResult

GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar"]


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The form that a request's output must have.

    Attributes:
        text: JSON text of a schema or of a list of choices, a regular expression, or a grammar.
        whitespace_pattern: regular expression of white space allowed inside JSON.
    """

    kind: GrammarKind
    text: str = ""
    whitespace_pattern: str | None = None


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """A new request."""

    request: SequenceRequest
    grammar: GrammarSpec | None = None


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End requests without an answer; unknown ids are ignored."""

    request_ids: list[str]


class EndBranches(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """End single branches (request id, branch): the caller's side has found a stop string."""

    branches: list[tuple[str, int]]


class SetTokenizer(msgspec.Struct, frozen=True, kw_only=True, tag="tokenizer"):
    """The tokenizer that grammars are compiled against; sent before the first of them.

    Attributes:
        json: the tokenizers library's own serialised form.
    """

    json: str
    eos_token_id: int


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """End the engine; requests that still run are dropped."""


ControlMessage = AddRequest | AbortRequests | EndBranches | SetTokenizer | Shutdown


class GroupUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one KV cache group, now.

    Attributes:
        num_total_blocks: in its own superblocks, and in the free ones that it could take.
        num_used_blocks: held by requests.
        num_cached_blocks: held by nobody, kept for prefix reuse, free to be taken.
        num_own_blocks: in its own superblocks.
    """

    name: str
    num_total_blocks: int
    num_used_blocks: int
    num_cached_blocks: int = 0
    num_own_blocks: int = 0


class CoreStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of the engine side at the end of a step; totals since the start unless stated.

    Attributes:
        num_running, num_waiting: requests, now.
        groups: blocks, now.
        cache_usage: share of the cache's bytes held by requests, 0 to 1.
        num_free_superblocks: owned by no group, now.
        num_cache_queries, num_cache_hits: prompt tokens looked up and found in the prefix cache.
        last_step_ms: time of the last step with work in it.
    """

    num_running: int = 0
    num_waiting: int = 0
    groups: list[GroupUsage] = []
    cache_usage: float = 0.0
    num_free_superblocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_cache_queries: int = 0
    num_cache_hits: int = 0
    last_step_ms: float = 0.0


class RequestFailure(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request that the engine side refused, or could not finish.

    Attributes:
        param: the request field at fault, or None.
        is_request_fault: whether the caller can mend it.
    """

    request_id: str
    message: str
    param: str | None = None
    is_request_fault: bool = True


class EngineOutputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    """What one step produced."""

    results: list[SequenceResult]
    failures: list[RequestFailure] = []
    stats: CoreStats
    time_s: float


class LayerKernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel that serves a layer, and why not another."""

    layer: int
    kernel: str
    note: str = ""


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What one KV cache group is.

    Attributes:
        block_bytes: on the first rank.
        blocks_per_sequence: most that a sequence of max_model_len tokens holds.
        waste: share of a superblock behind the group's last block.
    """

    name: str
    layers: list[int]
    block_tokens: int
    block_bytes: int
    blocks_per_superblock: int
    blocks_per_sequence: int
    waste: float


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine side has loaded the model and can serve.

    Attributes:
        num_cache_tokens: tokens that the whole cache holds.
        block_tokens: tokens of a block of the first group.
        groups: blocks of the empty cache.
        cache_groups: what each group is, in the same order.
        num_free_superblocks: of the empty cache: all.
        startup: further facts of the capacity report, for logs and `vllm stats`.
    """

    kernels: list[LayerKernelReport]
    groups: list[GroupUsage]
    num_cache_tokens: int
    num_gpu_blocks: int
    block_tokens: int
    cache_bytes: int
    weight_bytes: int
    load_seconds: float
    cache_groups: list[CacheGroup] = []
    num_free_superblocks: int = 0
    startup: dict[str, Any] = {}


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine side ends because of an error.

    Attributes:
        kind: name of the exception's type.
        message: what a user should read.
        trace: the traceback, for the log.
    """

    kind: str
    message: str
    trace: str = ""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """The engine process is alive.

    Attributes:
        step_age_s: how long the step that runs now has been running; 0 between steps.
    """

    step_age_s: float = 0.0


ReportMessage = EngineOutputs | EngineReady | EngineFailed | Heartbeat
