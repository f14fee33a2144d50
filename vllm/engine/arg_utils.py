"""What a user asks of an engine: EngineArgs, from keywords or from the command line.

The fields are 0.6.3's flags with underscores. Nothing is decided here: `create_engine_config`
hands the fields to config/resolve.py, the one place where "auto" becomes a value.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from vllm.config import EngineConfig, LoadConfig, ModelConfig
from vllm.config.resolve import resolve_engine_config
from vllm.engine.argument_types import read_arguments
from vllm.engine.flags import ASYNC_FLAGS, ENGINE_FLAGS, Flag
from vllm.hybrid.resolve import resolve_hybrid
from vllm.hybrid.state_dtype import decide_state_dtype
from vllm.model_executor.models import ModelRegistry
from vllm.plugins import load_general_plugins
from vllm.transformers_utils.config import find_architectures
from vllm.utils.argument_parser import FlexibleArgumentParser, StoreBoolean

DEFAULT_MODEL = "facebook/opt-125m"


@dataclass
class EngineArgs:
    """Arguments of an engine; `vllm serve --help` says what each means.

    Attributes:
        has_streams: whether somebody waits for every token, so that steps are kept short.
    """

    has_streams: ClassVar[bool] = False

    model: str = DEFAULT_MODEL
    served_model_name: str | list[str] | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    tokenizer_mode: str = "auto"
    trust_remote_code: bool = False
    download_dir: str | None = None
    load_format: str = "auto"
    config_format: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization_param_path: str | None = None
    seed: int = 0
    max_model_len: int | None = None
    worker_use_ray: bool = False
    distributed_executor_backend: str | None = None
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    max_parallel_loading_workers: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    disable_sliding_window: bool = False
    use_v2_block_manager: bool = True
    swap_space: float = 4
    cpu_offload_gb: float = 0
    gpu_memory_utilization: float = 0.90
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    max_logprobs: int = 20
    disable_log_stats: bool = False
    revision: str | None = None
    code_revision: str | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    tokenizer_revision: str | None = None
    quantization: str | None = None
    enforce_eager: bool | None = None
    max_context_len_to_capture: int | None = None
    max_seq_len_to_capture: int = 8192
    disable_custom_all_reduce: bool = False
    tokenizer_pool_size: int = 0
    tokenizer_pool_type: str | type = "ray"
    tokenizer_pool_extra_config: dict[str, Any] | str | None = None
    limit_mm_per_prompt: dict[str, int] | str | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    enable_prompt_adapter: bool = False
    max_prompt_adapters: int = 1
    max_prompt_adapter_token: int = 0
    fully_sharded_loras: bool = False
    lora_extra_vocab_size: int = 256
    long_lora_scaling_factors: tuple[float, ...] | str | None = None
    lora_dtype: str | None = "auto"
    max_cpu_loras: int | None = None
    device: str = "auto"
    num_scheduler_steps: int = 1
    multi_step_stream_outputs: bool = True
    ray_workers_use_nsight: bool = False
    num_gpu_blocks_override: int | None = None
    num_lookahead_slots: int = 0
    model_loader_extra_config: dict[str, Any] | str | None = None
    ignore_patterns: str | list[str] | None = None
    preemption_mode: str | None = None
    scheduler_delay_factor: float = 0.0
    enable_chunked_prefill: bool | None = None
    guided_decoding_backend: str = "auto"
    speculative_model: str | None = None
    speculative_model_quantization: str | None = None
    speculative_draft_tensor_parallel_size: int | None = None
    num_speculative_tokens: int | None = None
    speculative_disable_mqa_scorer: bool = False
    speculative_max_model_len: int | None = None
    speculative_disable_by_batch_size: int | None = None
    ngram_prompt_lookup_max: int | None = None
    ngram_prompt_lookup_min: int | None = None
    spec_decoding_acceptance_method: str = "rejection_sampler"
    typical_acceptance_sampler_posterior_threshold: float | None = None
    typical_acceptance_sampler_posterior_alpha: float | None = None
    disable_logprobs_during_spec_decoding: bool | None = None
    qlora_adapter_name_or_path: str | None = None
    otlp_traces_endpoint: str | None = None
    collect_detailed_traces: str | None = None
    disable_async_output_proc: bool = False
    override_neuron_config: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    scheduling_policy: str = "fcfs"
    hybrid_mode: bool | None = None
    hybrid_config: str | None = None
    hybrid_strict: bool = False
    mamba_ssm_cache_dtype: str = "auto"
    trace_level: str = "off"

    def __post_init__(self) -> None:
        """Take torch's element types by name; ConfigError for values of a wrong kind."""
        read_arguments(self)
        self.dtype = str(self.dtype)
        load_general_plugins()

    @staticmethod
    def add_cli_args(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
        """Add the engine's flags, in groups, and return the parser."""
        for title, flags in ENGINE_FLAGS.items():
            group = parser.add_argument_group(title)
            for flag in flags:
                _add_flag(group, flag, EngineArgs)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Take the fields of this class out of parsed arguments."""
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls)})

    def create_engine_config(self) -> EngineConfig:
        """Resolve every field.

        Raises: ConfigError naming the flag or the model's family, what was given and what is
            allowed.
        """
        ModelRegistry.check_architectures(  # before anything else of the model can be missed
            find_architectures(self.model, revision=self.revision, download_dir=self.download_dir)
        )
        config = resolve_engine_config(self)
        hybrid = resolve_hybrid(
            config.model_config.hf_config,
            config.model_config.max_model_len,
            mode=self.hybrid_mode,
            file=self.hybrid_config,
            is_strict=self.hybrid_strict,
            trace_level=self.trace_level,
        )
        model = decide_state_dtype(
            config.model_config, self.mamba_ssm_cache_dtype, config.device_config.device
        )
        return replace(config, model_config=model, hybrid=hybrid)

    def create_model_config(self) -> ModelConfig:
        """Resolve the fields that describe the model."""
        return resolve_engine_config(self).model_config

    def create_load_config(self) -> LoadConfig:
        """Resolve the fields that say how weights are read."""
        return resolve_engine_config(self).load_config


@dataclass
class AsyncEngineArgs(EngineArgs):
    """Arguments of an asynchronous engine."""

    has_streams: ClassVar[bool] = True

    disable_log_requests: bool = False

    @staticmethod
    def add_cli_args(
        parser: FlexibleArgumentParser, async_args_only: bool = False
    ) -> FlexibleArgumentParser:
        """Add the engine's flags, or only those that EngineArgs lacks, and return the parser."""
        if not async_args_only:
            EngineArgs.add_cli_args(parser)
        for flag in ASYNC_FLAGS:
            _add_flag(parser, flag, AsyncEngineArgs)
        return parser


def _add_flag(target: Any, flag: Flag, owner: type[EngineArgs]) -> None:
    names = ["--" + flag.field.replace("_", "-"), *([flag.short] if flag.short else [])]
    default = next(f.default for f in fields(owner) if f.name == flag.field)
    if flag.read is None:
        target.add_argument(*names, action=StoreBoolean, default=default, help=flag.help)
    elif flag.repeats:
        target.add_argument(
            *names, action="append", default=default, type=flag.read, help=flag.help
        )
    else:
        target.add_argument(
            *names,
            default=default,
            type=flag.read,
            choices=flag.choices,
            nargs=flag.nargs,
            metavar=None if flag.choices else _metavar(flag),
            help=flag.help,
        )


def _metavar(flag: Flag) -> str:
    if flag.read is int:
        return "N"
    if flag.read is float:
        return "X"
    return flag.field.rpartition("_")[2].upper()
