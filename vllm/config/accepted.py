"""Flags of 0.6.3 that this engine accepts without effect, or refuses.

Called by config/resolve.py before anything is read, so that a flag that cannot be honoured is said
at once. A flag at its default is never mentioned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.errors import ConfigError
from vllm.logger import init_logger, warn_once

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)

_Rule = tuple[str, Callable[["EngineArgs"], bool], str]

_REFUSED: tuple[_Rule, ...] = (
    ("enable_lora", lambda a: a.enable_lora, "LoRA adapters are not served; merge the adapter"),
    ("enable_prompt_adapter", lambda a: a.enable_prompt_adapter, "prompt adapters are not served"),
    (
        "qlora_adapter_name_or_path",
        lambda a: a.qlora_adapter_name_or_path is not None,
        "QLoRA adapters are not served; merge the adapter",
    ),
    (
        "speculative_model",
        lambda a: a.speculative_model is not None or a.num_speculative_tokens is not None,
        "speculative decoding is not served; leave its flags out",
    ),
    (
        "max_context_len_to_capture",
        lambda a: a.max_context_len_to_capture is not None,
        "it was replaced by max_seq_len_to_capture",
    ),
    (
        "limit_mm_per_prompt",
        lambda a: bool(a.limit_mm_per_prompt) or bool(a.mm_processor_kwargs),
        "only text models are served",
    ),
    (
        "otlp_traces_endpoint",
        lambda a: a.otlp_traces_endpoint is not None or a.collect_detailed_traces is not None,
        "traces are not exported; use /metrics",
    ),
    ("ray_workers_use_nsight", lambda a: a.ray_workers_use_nsight, "Ray profiling is not served"),
    ("override_neuron_config", lambda a: a.override_neuron_config is not None, "no Neuron here"),
    (
        "cpu_offload_gb",
        lambda a: a.cpu_offload_gb != 0,
        "weights are not streamed from the host; use a smaller model or more ranks",
    ),
    ("swap_space", lambda a: a.swap_space < 0, "it may not be negative"),
    (
        "tokenizer_mode",
        lambda a: a.tokenizer_mode == "mistral",
        "the mistral tokenizer is not served; use the Hugging Face form of the model",
    ),
    (
        "config_format",
        lambda a: a.config_format == "mistral",
        "params.json is not served; use the Hugging Face form of the model",
    ),
    ("num_scheduler_steps", lambda a: a.num_scheduler_steps < 1, "it must be at least 1"),
    ("max_logprobs", lambda a: a.max_logprobs < 0, "it may not be negative"),
)

_IGNORED: tuple[_Rule, ...] = (
    ("swap_space", lambda a: a.swap_space not in (0, 4), "preempted requests are recomputed"),
    (
        "preemption_mode",
        lambda a: a.preemption_mode == "swap",
        "preempted requests are recomputed, not swapped",
    ),
    (
        "num_scheduler_steps",
        lambda a: a.num_scheduler_steps > 1,
        "every step is scheduled; the scheduler is fast enough",
    ),
    (
        "multi_step_stream_outputs",
        lambda a: not a.multi_step_stream_outputs,
        "every step is streamed",
    ),
    ("use_v2_block_manager", lambda a: not a.use_v2_block_manager, "there is one block manager"),
    ("num_lookahead_slots", lambda a: a.num_lookahead_slots != 0, "nothing looks ahead"),
    (
        "max_seq_len_to_capture",
        lambda a: a.max_seq_len_to_capture != 8192,
        "CUDA graphs take sequences of every length",
    ),
    (
        "guided_decoding_backend",
        lambda a: a.guided_decoding_backend not in ("auto", "llguidance"),
        "llguidance serves every form of structured output",
    ),
    (
        "code_revision",
        lambda a: a.code_revision is not None,
        "code of a checkpoint is taken at the revision of its other files",
    ),
    ("tokenizer_pool_size", lambda a: a.tokenizer_pool_size != 0, "tokenising needs no pool"),
    (
        "max_parallel_loading_workers",
        lambda a: a.max_parallel_loading_workers is not None,
        "ranks load together",
    ),
    (
        "quantization_param_path",
        lambda a: a.quantization_param_path is not None,
        "the KV cache has no scales",
    ),
    (
        "model_loader_extra_config",
        lambda a: bool(a.model_loader_extra_config) and a.load_format != "dummy",
        "only load_format dummy takes options",
    ),
)


def check_accepted(args: EngineArgs) -> None:
    """Refuse what cannot be honoured, warn once of what has no effect.

    Raises: ConfigError naming the flag and the way out.
    """
    for name, is_given, reason in _REFUSED:
        if is_given(args):
            raise ConfigError(f"--{name.replace('_', '-')}: {reason}")
    for name, is_given, reason in _IGNORED:
        if is_given(args):
            warn_once(logger, f"--{name.replace('_', '-')} is accepted and has no effect: {reason}")
