"""A tiny Llama with made-up weights behind an executor, and plans for it without a scheduler.

Used by tests of executors. Small enough that two ranks load it in a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.cache_spec import CacheLayout, GroupLayout
from vllm.config import (
    CacheConfig,
    DummyConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from vllm.executor.abstract import Executor
from vllm.step import NewRow, PlanRow, RowOutput, RowSampling, StepPlan
from vllm.types import DType

MAX_LEN = 128
LIKE_TRAINED = DummyConfig(value_range=0.035, has_random_norms=False, has_one_seed=False)
"""Made-up weights with the deviation of fresh models, 0.02, so that answers differ."""
BLOCK_TOKENS = 16
TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def make_config(
    ranks: int = 1, backend: str | None = None, pipeline: int = 1, **hf_config: Any
) -> EngineConfig:
    """Return a config of the tiny model; `hf_config` fields replace TINY_LLAMA's."""
    return EngineConfig(
        model_config=ModelConfig(
            model="tiny-llama",
            tokenizer="tiny-llama",
            skip_tokenizer_init=True,
            dtype=DType.FLOAT32,
            hf_config={**TINY_LLAMA, **hf_config},
            max_model_len=MAX_LEN,
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, cache_bytes=4 << 20),
        parallel_config=ParallelConfig(
            tensor_parallel_size=ranks,
            pipeline_parallel_size=pipeline,
            distributed_executor_backend=backend,
        ),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=512, max_num_seqs=8, max_model_len=MAX_LEN
        ),
        load_config=LoadConfig(load_format="dummy", use_tqdm=False, dummy=LIKE_TRAINED),
    )


def make_layout(executor: Executor, num_superblocks: int = 40) -> CacheLayout:
    """Return a layout of one group over all layers of the model."""
    layers = tuple(spec.layer for spec in executor.reports()[0].cache_specs)
    group = GroupLayout(
        name="full", layers=layers, block_tokens=BLOCK_TOKENS, blocks_per_superblock=1
    )
    return CacheLayout(groups=(group,), num_superblocks=num_superblocks)


def make_first_plan(
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[RowSampling],
    processors: Sequence[tuple[Callable[..., Any], ...]] | None = None,
) -> StepPlan:
    """Return the step that computes whole prompts; sequence i gets blocks 5 * i to 5 * i + 4."""
    return StepPlan(
        step=0,
        new_rows=[
            NewRow(
                seq_id=i,
                branch=0,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                num_computed_tokens=0,
                block_ids=(list(range(5 * i, 5 * i + 5)),),
                sampling=sampling[i],
                logits_processors=processors[i] if processors else (),
            )
            for i, prompt in enumerate(prompts)
        ],
        rows=[
            PlanRow(
                seq_id=i,
                num_computed_tokens=0,
                num_new_tokens=len(prompt),
                new_block_ids=(),
            )
            for i, prompt in enumerate(prompts)
        ],
    )


def run_steps(executor: Executor, first: StepPlan, num_steps: int) -> list[list[RowOutput]]:
    """Run a first step and then decode every row; returns the rows of each step."""
    lens = {row.seq_id: row.num_new_tokens for row in first.rows}
    outputs = [executor.submit(first).wait().rows]
    for step in range(1, num_steps):
        rows = [
            PlanRow(
                seq_id=seq_id,
                num_computed_tokens=length + step - 1,
                num_new_tokens=1,
                new_block_ids=([],),
            )
            for seq_id, length in lens.items()
        ]
        outputs.append(executor.submit(StepPlan(step=step, rows=rows)).wait().rows)
    return outputs
