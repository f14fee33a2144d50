"""Which tokens of a prompt the upper layers of a model have to compute at all.

What an answer sees of a layer with a window W are the keys of the last W tokens. To compute those
of layer l for the last r tokens, layer l - 1 must have been run for these, and for the answer that
layer l itself gives to r tokens, for r + W - 1. So counted from the last layer down, each layer has
to be run for a few tokens more than the one above it, up to the first layer that keeps every token:
its keys need everything below it, and for everything below it all tokens are run. The same holds
for whoever resumes from a checkpoint: what is cached there are the rows of the last W tokens.

Asked once by the worker, which leaves the other tokens out (`worker/cut_batch.py`), and by the
engine, whose prefix index must not offer rows that were never computed. Our own derivation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm.cache_spec import Full, KVCacheGroup, LayerCacheSpec, Nothing, State, Window


def find_reaches(specs: Sequence[LayerCacheSpec]) -> tuple[tuple[int, int], ...]:
    """Return (layer, the last tokens of a prompt that go on behind its attention), ascending.

    Layers that are not named pass on as many tokens as they get. Behind the last layer with a cache
    only sampled tokens go on, which is not for this function to say.

    Args:
        specs: what each decoder layer keeps, its policy applied.
    """
    if any(isinstance(spec.lifetime, State) for spec in specs):
        return ()  # they resume from copies at positions of their own
    reaches: list[tuple[int, int]] = []
    num_tokens = 1
    for spec in reversed(specs):
        if isinstance(spec.lifetime, Nothing) and spec.reads_from is None:
            continue
        if num_tokens > 1:
            reaches.append((spec.layer, num_tokens))
        if not isinstance(spec.lifetime, Window) or spec.lifetime.sinks or not spec.fields:
            break
        num_tokens += max(1, spec.lifetime.tokens) - 1
    return tuple(reversed(reaches))


def find_last_keeper(specs: Sequence[LayerCacheSpec], windows: Mapping[int, int]) -> int | None:
    """Return the last layer that keeps anything, where layers behind it read others, else None.

    They are run for sampled tokens alone, when all rows of the step are written. What they see with
    a window must still be kept then: that is one row more than a later step sees.

    Args:
        specs: what each decoder layer keeps, its policy applied.
        windows: attention layer -> tokens that it sees; 0 is all.
    """
    last = max((spec.layer for spec in specs if spec.fields), default=0)
    readers = [spec for spec in specs[last + 1 :] if spec.reads_from is not None]
    has_all = all(
        isinstance(spec.lifetime, Full)
        or (isinstance(spec.lifetime, Window) and 0 < windows[spec.layer] < spec.lifetime.tokens)
        for spec in readers
    )
    return last if readers and has_all else None


def find_group_reaches(
    specs: Sequence[LayerCacheSpec], groups: Sequence[KVCacheGroup]
) -> tuple[int | None, ...]:
    """Return, by group, how many of a prompt's last tokens all its layers compute; None is all."""
    reaches = find_reaches(specs)
    return tuple(
        min((n for layer, n in reaches if layer < max(group.layers)), default=None)
        for group in groups
    )
