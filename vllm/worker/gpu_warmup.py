"""The kinds of steps that a server on a GPU will see, run so that their kernels are known.

Called by `gpu_kernels.py` between loading and the memory profile, while launches are only noted. A
kernel's compiled form depends on the sizes of a step only by a few thresholds (rows of a product,
tokens of an expert, one row or more), which the steps here stand on both sides of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vllm.attention.backends.long_prompts import MAX_CHUNK_TOKENS
from vllm.batch import ForwardBatch, GroupBatch, LayerCache
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.interfaces import TextModel
from vllm.worker.block_table import GroupGeometry
from vllm.worker.gpu_model_runner import GpuModelRunner, RunnerLimits
from vllm.worker.prompt_size import PromptSize

_DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_FEWEST_PROMPT_TOKENS = 16
_CHUNKS = ((64, 64), (64, 1024))
"""New and computed tokens of prompts that come in small parts."""

_MANY_ROWS = 32
_ALIKE_LAYERS = 2

_ALIGNMENT_BYTES = 16
"""On how an address divides by it a compiled kernel depends."""


@torch.inference_mode()
def run_all_steps(
    model: TextModel,
    runner: GpuModelRunner,
    geometries: Sequence[GroupGeometry],
    limits: RunnerLimits,
    device: torch.device,
) -> None:
    """Run steps of all kinds, on a cache that nobody reads.

    Args:
        model: loaded, with its kernels bound.
        runner: of that model or of some of its layers, on a cache of any size.
        geometries: of that cache's groups.
        limits: what a step may hold.
        device: where steps run.
    """
    for new_lens, computed_lens in list_steps(limits):
        runner.run_forward(make_step(new_lens, computed_lens, geometries, device=device))
    for size in choose_sizes(runner.prompt_sizes):
        runner.run_prompts(size)
    for num_rows in sorted({min(rows, limits.max_num_seqs) for rows in _DECODE_ROWS}):
        model.compute_logits(runner.run_decode(num_rows))


def choose_layers(model: CausalLM, caches: Sequence[LayerCache | None]) -> list[int]:
    """Return layers that launch all that the model launches: two of each kind, and the last ones.

    Nothing is to be added before the first norm, and behind the last mixer there are fewer tokens.

    Args:
        model: its layers are bound to their kernels.
        caches: of its layers.
    """
    mixers = [i for i, block in enumerate(model.blocks) if block.attention is not None]
    chosen = set(range(max(mixers, default=0), len(model.blocks)))
    kinds: list[tuple[Any, ...]] = []
    for i, (block, shape) in enumerate(zip(model.blocks, model.shape.layers, strict=True)):
        layer, cache = block.kernel_layer, caches[i]
        own = None if layer is None else (layer.kernel, layer.query)
        places = [] if cache is None else [t.data_ptr() % _ALIGNMENT_BYTES for t in cache.tensors]
        kind = (shape, own, places, None if cache is None else cache.group)
        if kinds.count(kind) < _ALIKE_LAYERS:
            chosen.add(i)
        kinds.append(kind)
    return sorted(chosen)


def choose_sizes(sizes: Sequence[PromptSize]) -> list[PromptSize]:
    """Return the largest padded step of each kind that wants kernels of its own.

    Rows decide what attention and state layers launch, and whether the prompts are short. Products
    and mixtures go by the tokens alone, as in steps that are not padded.

    Args:
        sizes: ascending.
    """
    kinds: dict[tuple[int, int, bool], PromptSize] = {}
    for size in sizes:
        is_short = size.num_prompt_tokens <= MAX_CHUNK_TOKENS
        kinds[size.num_decode_rows, size.num_prompt_rows, is_short] = size
    return list(kinds.values())


def list_steps(limits: RunnerLimits) -> Iterator[tuple[list[int], list[int]]]:
    """Yield new and computed tokens of each row of steps that are not decode steps."""
    longest = min(limits.max_model_len, limits.max_num_batched_tokens)
    num_tokens = longest
    while num_tokens > 1:
        yield [num_tokens], [0]
        num_tokens = num_tokens // 2 if num_tokens > _FEWEST_PROMPT_TOKENS else 0
    rows = min(_MANY_ROWS, limits.max_num_seqs)
    if longest // rows > 1:
        yield [longest // rows] * rows, [0] * rows
    for num_new, num_computed in ((longest // 4, 0), *_CHUNKS, (longest // 4, longest // 4)):
        if not 2 <= num_new <= limits.max_num_batched_tokens:
            continue
        if num_new + num_computed > limits.max_model_len:
            continue
        yield [num_new], [num_computed]
        if num_new < limits.max_num_batched_tokens and limits.max_num_seqs > 1:
            yield [1, num_new], [num_new, num_computed]


def make_step(
    new_lens: Sequence[int],
    computed_lens: Sequence[int],
    geometries: Sequence[GroupGeometry],
    *,
    device: torch.device,
) -> ForwardBatch:
    """Return a step of rows that are stored nowhere; rows of one token come first."""
    new = torch.tensor(new_lens, dtype=torch.int32, device=device)
    computed = torch.tensor(computed_lens, dtype=torch.int32, device=device)
    ends = torch.cumsum(new, 0, dtype=torch.int32)
    starts = zip(new_lens, computed_lens, strict=True)
    positions = torch.cat([torch.arange(c, c + n, device=device) for n, c in starts])
    longest = max(n + c for n, c in zip(new_lens, computed_lens, strict=True))
    groups = []
    for geometry in geometries:
        width = 1 if geometry.is_per_sequence else -(-longest // geometry.block_tokens)
        num_slots = 0 if geometry.is_per_sequence else len(positions)
        groups.append(
            GroupBatch(
                block_offsets=torch.full(
                    (len(new_lens), width), geometry.pad_offset, dtype=torch.int32, device=device
                ),
                slots=torch.full((num_slots, 2), -1, dtype=torch.int32, device=device),
                block_tokens=geometry.block_tokens,
            )
        )
    return ForwardBatch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        cu_query_lens=torch.cat((torch.zeros_like(ends[:1]), ends)),
        seq_lens=new + computed,
        computed_lens=computed,
        logits_rows=ends.long() - 1,
        groups=tuple(groups),
        max_query_len=max(new_lens),
        max_seq_len=longest,
        num_decode_rows=sum(n == 1 for n in new_lens),
        new_lens_cpu=tuple(new_lens),
        computed_lens_cpu=tuple(computed_lens),
    )
