"""A driver whose caches keep only what each layer's lifetime says, as the hybrid engine's do.

Rows that no later step sees are not stored, blocks that no query sees are replaced by the pad
block, and both are NaN: a layer that looks further back than its lifetime shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.hybrid.models.checks import make_driver
from tests.hybrid.models.tiny import TinyCheckpoint
from tests.models.compare import make_prompts
from tests.models.families import load_ours
from tests.utils.paged_driver import PagedDriver
from vllm.batch import GroupBatch
from vllm.cache_spec import Chunk, Lifetime, Window
from vllm.config.hybrid import HybridConfig
from vllm.hybrid.apply import limit_layers
from vllm.hybrid.assign import assign_layers
from vllm.model_executor.models.causal_lm import CausalLM


class ForgettingDriver(PagedDriver):
    """See the module."""

    def _make_group_batch(
        self, index: int, numbers: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> GroupBatch:
        batch = super()._make_group_batch(index, numbers, starts, ends)
        lifetime = self._groups[index].group.lifetime
        num_sinks = lifetime.sinks if isinstance(lifetime, Window) else 0
        first_kept = -(-num_sinks // batch.block_tokens)
        token = 0
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            first_seen = find_first_seen(lifetime, start) // batch.block_tokens
            batch.block_offsets[row, first_kept:first_seen] = self._groups[index].pad
            first_stored = find_first_seen(lifetime, end)
            for position in range(start, end):
                if num_sinks <= position < first_stored:
                    batch.slots[token, 0] = -1
                token += 1
        return batch


def find_first_seen(lifetime: Lifetime, position: int) -> int:
    """Return the first position that a query at `position` sees, sinks left aside."""
    if isinstance(lifetime, Window):
        return max(0, position - lifetime.tokens + 1)
    if isinstance(lifetime, Chunk):
        return position // lifetime.tokens * lifetime.tokens
    return 0


def limit_model(
    model: CausalLM,
    config: dict[str, object],
    hybrid: HybridConfig | None = None,
    max_model_len: int = 512,
) -> CausalLM:
    """Give each layer the policy that the engine would give it."""
    policies = assign_layers(config, hybrid or HybridConfig(enabled=True), max_model_len)
    assert policies is not None
    limit_layers(model.attention_layers(), policies)
    return model


def check_hybrid_equals_vanilla(checkpoint: TinyCheckpoint, lengths: Sequence[int]) -> None:
    """Caches that keep what the checkpoint's lifetimes say give the bits of those that keep all."""
    prompts = make_prompts(lengths)
    model = limit_model(load_ours(checkpoint.config, checkpoint.weights), checkpoint.config)
    assert len({spec.lifetime for spec in model.cache_specs()}) > 1
    for chunk_tokens in (1 << 30, 13):
        driver = ForgettingDriver(model, kernel="cpu", poison_freed=True)
        found = driver.generate(prompts, 30, chunk_tokens=chunk_tokens)
        for one, other in zip(found, make_driver(checkpoint).generate(prompts, 30), strict=True):
            assert one.token_ids == other.token_ids
            assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
