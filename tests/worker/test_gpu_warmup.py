"""The steps whose kernels are compiled ahead: shapes only, nothing is launched here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.gpu.families import write_checkpoint
from vllm import EngineArgs
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.model_loader.loader import get_model_architecture
from vllm.worker.block_table import GroupGeometry
from vllm.worker.gpu_model_runner import RunnerLimits
from vllm.worker.gpu_warmup import choose_layers, choose_sizes, list_steps, make_step
from vllm.worker.prompt_size import list_prompt_sizes


def make_limits(num_seqs: int, model_len: int, num_tokens: int) -> RunnerLimits:
    return RunnerLimits(
        max_num_seqs=num_seqs,
        max_model_len=model_len,
        max_num_batched_tokens=num_tokens,
        has_graphs=True,
    )


@pytest.mark.parametrize("limits", [(256, 8192, 2048), (1, 64, 64), (8, 17, 512), (2, 1, 1)])
def test_steps_are_within_the_limits(limits: tuple[int, int, int]) -> None:
    num_seqs, model_len, num_tokens = limits
    for new_lens, computed_lens in list_steps(make_limits(*limits)):
        assert len(new_lens) == len(computed_lens) <= num_seqs
        assert sum(new_lens) <= num_tokens
        assert all(n + c <= model_len for n, c in zip(new_lens, computed_lens, strict=True))
        assert max(new_lens) > 1, "decode steps are others"


@pytest.mark.parametrize("limits", [(256, 8192), (64, 512), (1, 1024), (1, 16), (3, 100)])
def test_one_padded_step_of_each_kind(limits: tuple[int, int]) -> None:
    """One prompt of at most 128 tokens is a kind, whose kernel no longer prompt wants."""
    sizes = list_prompt_sizes(*limits)
    kinds = [
        {(s.num_decode_rows, s.num_prompt_rows, s.num_prompt_tokens <= 128): s for s in some}
        for some in (sizes, choose_sizes(sizes))
    ]
    assert kinds[0] == kinds[1]
    assert len(choose_sizes(sizes)) == len(kinds[0])


def test_two_layers_of_each_kind_and_the_last_stand_for_all(tmp_path: Path) -> None:
    directory = write_checkpoint("gemma3", tmp_path)
    config = EngineArgs(
        model=str(directory), device="cpu", skip_tokenizer_init=True, max_model_len=64
    ).create_engine_config()
    cls, _ = get_model_architecture(config.model_config)
    fields = config.model_config.hf_config
    types = [*["sliding_attention"] * 3, "full_attention"] * 3
    fields = {**fields, "layer_types": types, "num_hidden_layers": len(types)}
    with torch.device("meta"):
        model = cls(fields, dtype=torch.float32, tp=TensorParallel.single(), max_model_len=64)
    layers = choose_layers(model, [None] * len(types))
    assert layers == [0, 1, 3, 7, 11]
    part = model.take_layers(layers)
    assert part.blocks == tuple(model.blocks[i] for i in layers)
    assert len(model.blocks) == len(types)
    assert part.plan_stages() == part.blocks != model.plan_stages()


def test_a_step_is_stored_nowhere() -> None:
    paged = GroupGeometry(
        block_tokens=16, blocks_per_superblock=4, superblock_units=8, block_units=2, pad_offset=6
    )
    state = GroupGeometry(
        block_tokens=1,
        blocks_per_superblock=1,
        superblock_units=8,
        block_units=8,
        pad_offset=8,
        is_per_sequence=True,
    )
    step = make_step([1, 20], [40, 3], [paged, state], device=torch.device("cpu"))
    assert step.positions.tolist() == [40, *range(3, 23)]
    assert step.cu_query_lens.tolist() == [0, 1, 21]
    assert step.seq_lens.tolist() == [41, 23]
    assert step.logits_rows.tolist() == [0, 20]
    assert (step.max_query_len, step.max_seq_len, step.num_decode_rows) == (20, 41, 1)
    first, second = step.groups
    assert first.block_offsets.tolist() == [[6, 6, 6]] * 2
    assert first.slots.tolist() == [[-1, -1]] * 21
    assert second.block_offsets.tolist() == [[8], [8]]
    assert second.slots.shape == (0, 2)
