"""Which rows of a step attend to latents and which to keys and values of each head.

Called by `layers/mla.py` once a step, with lengths that the host knows; nothing waits for the
device. To expand costs a product for every key, to attend to latents more than three times the
operations for every pair of tokens: rows with many new tokens are expanded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from vllm._custom_ops.triton.attention_args import JoinedRows
from vllm.attention.backends.long_prompts import MAX_CHUNK_TOKENS, send_lens
from vllm.attention.backends.paged_attn import PagedAttention
from vllm.attention.split_batch import split_batch
from vllm.batch import AttentionState, ForwardBatch
from vllm.model_executor.layers.latent_expansion import LatentSizes

MIN_EXPANDED_TOKENS = 256
"""Of the longest prompt of a step, where none goes on; fewer do not pay the launches."""

MAX_EXPANDED_KEYS = 1 << 15
"""Of rows with cached tokens; what is made of a key lies beside the cache for one layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentRows:
    """A step's rows, cut in two.

    Attributes:
        absorbed: the rows that attend to latents, or None.
        state: the step's plans and caches for them.
        expanded: the other rows, behind them, or None.
        keys: what those see where one of them goes on behind cached tokens, else None.
    """

    absorbed: ForwardBatch | None
    state: AttentionState
    expanded: ForwardBatch | None
    keys: JoinedRows | None

    @property
    def equal_len(self) -> int:
        """The length of the expanded rows if they are equal and whole, else 0."""
        if self.expanded is None or self.keys is not None:
            return 0
        lens = set(self.expanded.new_lens_cpu)
        return lens.pop() if len(lens) == 1 else 0


def cut_rows(
    batch: ForwardBatch, state: AttentionState, sizes: LatentSizes, kernel: str | None
) -> LatentRows:
    """Decide how the rows of a step are served.

    Args:
        batch: the step.
        state: the step's plans.
        sizes: of the layer.
        kernel: what serves rows that attend to latents.
    """
    num_absorbed, num_rows = count_absorbed_rows(batch, sizes), batch.seq_lens.shape[0]
    if num_absorbed == num_rows:
        return LatentRows(absorbed=batch, state=state, expanded=None, keys=None)
    if num_absorbed == 0:
        return LatentRows(absorbed=None, state=state, expanded=batch, keys=_join(batch))
    absorbed, expanded = split_batch(batch, num_absorbed)
    keys = [key for key in state.plans if key[1] == kernel]
    own = replace(state, plans=PagedAttention.plan(absorbed, keys))
    return LatentRows(absorbed=absorbed, state=own, expanded=expanded, keys=_join(expanded))


def count_absorbed_rows(batch: ForwardBatch, sizes: LatentSizes) -> int:
    """Return how many leading rows attend to latents; those behind them are expanded."""
    num_rows = batch.seq_lens.shape[0]
    new_lens, computed_lens = batch.new_lens_cpu, batch.computed_lens_cpu
    if sizes.value > sizes.nope + sizes.rope or not computed_lens:
        return num_rows
    first, num_keys = num_rows, 0
    while first > 0:
        new, computed = new_lens[first - 1], computed_lens[first - 1]
        num_keys += new + computed
        is_few = new <= MAX_CHUNK_TOKENS or num_keys > MAX_EXPANDED_KEYS
        if computed > 0 and is_few:
            break
        first -= 1
    goes_on = any(computed_lens[first:])
    longest = max(new_lens[first:], default=0)
    return first if goes_on or longest >= MIN_EXPANDED_TOKENS else num_rows


def count_expanded_keys(max_new_tokens: int) -> int:
    """Return the most keys that a step of so many new tokens expands where prompts go on.

    Prompts that do not go on may stand on both sides of those that do.
    """
    return MAX_EXPANDED_KEYS + max_new_tokens


def _join(batch: ForwardBatch) -> JoinedRows | None:
    if not any(batch.computed_lens_cpu):
        return None
    lens = [n + c for n, c in zip(batch.new_lens_cpu, batch.computed_lens_cpu, strict=True)]
    cu_lens = send_lens([0, *accumulate(lens)], batch.seq_lens.device)
    return JoinedRows(cu_key_lens=cu_lens, num_keys=sum(lens), max_key_len=max(lens))
