"""The engine's flags as a table: group, field of EngineArgs, how it is read, what it means.

`engine/arg_utils.py` turns the table into command-line options; a test holds the list of names. A
flag is a row here and a field there; what its value means is decided in config/resolve.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def parse_optional_text(text: str) -> str | None:
    """Return the text, None for "" and "None"."""
    return None if text in ("", "None") else text


def parse_json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that `text` holds; raises argparse.ArgumentTypeError otherwise."""
    try:
        value = json.loads(text)
    except ValueError as cause:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}: {cause}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One option.

    Attributes:
        field: of EngineArgs; its name with dashes is the option.
        read: makes the value from text; None is a switch.
        nargs: "+" for one or more values.
        repeats: whether the option may be given several times.
        short: another spelling.
    """

    field: str
    help: str
    read: Callable[[str], Any] | None = parse_optional_text
    choices: tuple[str | int | None, ...] | None = None
    nargs: str | None = None
    repeats: bool = False
    short: str | None = None


def _switch(field: str, text: str) -> Flag:
    return Flag(field=field, help=text, read=None)


LOAD_FORMATS = (
    "auto", "pt", "safetensors", "npcache", "dummy", "tensorizer", "sharded_state", "gguf",
    "bitsandbytes", "mistral",
)  # fmt: skip
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
QUANTIZATIONS = (
    "aqlm", "awq", "deepspeedfp", "tpu_int8", "fp8", "fbgemm_fp8", "modelopt", "marlin", "gguf",
    "gptq_marlin_24", "gptq_marlin", "awq_marlin", "gptq", "compressed-tensors", "bitsandbytes",
    "qqq", "experts_int8", "neuron_quant", "ipex", None,
)  # fmt: skip
DEVICES = ("auto", "cuda", "neuron", "cpu", "openvino", "tpu", "xpu")
GUIDED_BACKENDS = ("auto", "llguidance", "outlines", "lm-format-enforcer", "xgrammar")

_MODEL = (
    Flag(field="model", help="model: directory, GGUF file or hub id"),
    Flag(field="tokenizer", help="tokenizer: directory, GGUF file or hub id (the model's)"),
    _switch("skip_tokenizer_init", "no tokenizer: prompts are token ids, answers have no text"),
    Flag(field="served_model_name", nargs="+", help="names accepted in requests (the model's)"),
    Flag(field="revision", help="branch, tag or commit of the model"),
    Flag(field="code_revision", help="accepted; the model's revision holds"),
    Flag(field="tokenizer_revision", help="same, for the tokenizer (the model's)"),
    Flag(
        field="tokenizer_mode",
        choices=("auto", "slow", "mistral"),
        help="auto takes the fast tokenizer where there is one",
    ),
    _switch("trust_remote_code", "let Python code in the checkpoint run"),
    Flag(field="download_dir", help="where files of hub ids are kept"),
    Flag(field="load_format", choices=LOAD_FORMATS, help="format of the weight files"),
    Flag(field="config_format", choices=("auto", "hf", "mistral"), help="format of the config"),
    Flag(field="dtype", choices=DTYPES, help="element type of weights and activations"),
    Flag(
        field="kv_cache_dtype",
        choices=("auto", "fp8", "fp8_e5m2", "fp8_e4m3"),
        help="element type of the KV cache; auto is the model's",
    ),
    Flag(field="quantization_param_path", help="JSON file with scales of the KV cache"),
    Flag(field="max_model_len", read=int, help="most tokens of a sequence (from the config)"),
    Flag(
        field="quantization",
        short="-q",
        choices=QUANTIZATIONS,
        help="how weights are quantised (from the checkpoint)",
    ),
    Flag(field="rope_scaling", read=parse_json_object, help="JSON that replaces rope_scaling"),
    Flag(field="rope_theta", read=float, help="replaces rope_theta"),
    Flag(
        field="model_loader_extra_config",
        help='JSON for load_format dummy: {"range": 0.001, "norms": "random" or "one", '
        '"seed": "one" or "name"}',
    ),
    Flag(field="ignore_patterns", repeats=True, help="files of a hub id that are not fetched"),
    Flag(field="seed", read=int, help="first seed of requests without one"),
    Flag(field="max_logprobs", read=int, help="upper bound of logprobs and prompt_logprobs"),
    Flag(
        field="guided_decoding_backend",
        choices=GUIDED_BACKENDS,
        help="accepted; llguidance serves every form of structured output",
    ),
    Flag(field="qlora_adapter_name_or_path", help="not served"),
    Flag(field="limit_mm_per_prompt", help="not served"),
    Flag(field="mm_processor_kwargs", read=parse_json_object, help="not served"),
    Flag(field="tokenizer_pool_size", read=int, help="accepted; tokenising needs no pool"),
    Flag(field="tokenizer_pool_type", help="accepted; tokenising needs no pool"),
    Flag(field="tokenizer_pool_extra_config", help="accepted; tokenising needs no pool"),
)

_PARALLEL = (
    Flag(field="device", choices=DEVICES, help="kind of device"),
    Flag(field="tensor_parallel_size", short="-tp", read=int, help="ranks that share every layer"),
    Flag(field="pipeline_parallel_size", short="-pp", read=int, help="stages of layers"),
    Flag(
        field="distributed_executor_backend",
        choices=("ray", "mp", None),
        help="how ranks are started; several ranks take mp if unset",
    ),
    _switch("worker_use_ray", "old name of --distributed-executor-backend ray"),
    Flag(field="max_parallel_loading_workers", read=int, help="accepted; ranks load together"),
    _switch("ray_workers_use_nsight", "not served"),
    _switch("disable_custom_all_reduce", "leave sums over GPUs to NCCL"),
    Flag(field="override_neuron_config", read=parse_json_object, help="not served"),
)

_CACHE = (
    Flag(field="block_size", read=int, choices=(8, 16, 32), help="tokens of a cache block"),
    Flag(
        field="gpu_memory_utilization",
        read=float,
        help="share of a GPU's memory that this instance plans with",
    ),
    Flag(field="swap_space", read=float, help="accepted; preempted requests are recomputed"),
    Flag(field="cpu_offload_gb", read=float, help="not served"),
    Flag(field="num_gpu_blocks_override", read=int, help="number of blocks, whatever the memory"),
    _switch("enable_prefix_caching", "reuse the cache of equal beginnings (on)"),
    _switch("disable_sliding_window", "cap the length at the window instead of masking"),
    _switch("use_v2_block_manager", "accepted; there is one block manager"),
    Flag(field="num_lookahead_slots", read=int, help="accepted; not used"),
)

_HYBRID = (
    _switch(
        "hybrid_mode",
        "each layer keeps what it needs; false keeps every token in every layer (auto: by model)",
    ),
    Flag(field="hybrid_config", help="JSON file: block size, kernel, ratio of each layer type"),
    _switch("hybrid_strict", "a kernel that is not available is an error, not replaced"),
    Flag(
        field="mamba_ssm_cache_dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="element type of recurrent states; auto is the config's, else float32",
    ),
    Flag(
        field="trace_level",
        choices=("off", "info", "debug"),
        help="log the cache's work: info a line a step, debug each allocation",
    ),
)

_SCHEDULING = (
    Flag(field="max_num_seqs", read=int, help="most sequences in a step, each of n counted"),
    Flag(field="max_num_batched_tokens", read=int, help="token budget of a step"),
    _switch("enable_chunked_prefill", "cut prompts over several steps (on)"),
    Flag(field="scheduling_policy", choices=("fcfs", "priority"), help="order of requests"),
    Flag(
        field="scheduler_delay_factor",
        read=float,
        help="wait so many times the last prompt's latency before new prompts enter",
    ),
    Flag(field="preemption_mode", help="accepted; preempted requests are recomputed"),
    Flag(field="num_scheduler_steps", read=int, help="accepted; every step is scheduled"),
    _switch("multi_step_stream_outputs", "accepted; every step is streamed"),
    _switch("disable_async_output_proc", "plan a step only when the last has returned"),
)

_EXECUTION = (
    _switch("enforce_eager", "no CUDA graphs"),
    Flag(field="max_seq_len_to_capture", read=int, help="accepted; graphs take every length"),
    Flag(field="max_context_len_to_capture", read=int, help="removed in favour of the above"),
)

_ADAPTERS = (
    _switch("enable_lora", "not served"),
    Flag(field="max_loras", read=int, help="not served"),
    Flag(field="max_lora_rank", read=int, help="not served"),
    Flag(field="lora_extra_vocab_size", read=int, help="not served"),
    Flag(field="lora_dtype", help="not served"),
    Flag(field="long_lora_scaling_factors", help="not served"),
    Flag(field="max_cpu_loras", read=int, help="not served"),
    _switch("fully_sharded_loras", "not served"),
    _switch("enable_prompt_adapter", "not served"),
    Flag(field="max_prompt_adapters", read=int, help="not served"),
    Flag(field="max_prompt_adapter_token", read=int, help="not served"),
)

_SPECULATION = (
    Flag(field="speculative_model", help="not served"),
    Flag(field="speculative_model_quantization", choices=QUANTIZATIONS, help="not served"),
    Flag(field="num_speculative_tokens", read=int, help="not served"),
    _switch("speculative_disable_mqa_scorer", "not served"),
    Flag(
        field="speculative_draft_tensor_parallel_size",
        short="-spec-draft-tp",
        read=int,
        help="not served",
    ),
    Flag(field="speculative_max_model_len", read=int, help="not served"),
    Flag(field="speculative_disable_by_batch_size", read=int, help="not served"),
    Flag(field="ngram_prompt_lookup_max", read=int, help="not served"),
    Flag(field="ngram_prompt_lookup_min", read=int, help="not served"),
    Flag(
        field="spec_decoding_acceptance_method",
        choices=("rejection_sampler", "typical_acceptance_sampler"),
        help="not served",
    ),
    Flag(field="typical_acceptance_sampler_posterior_threshold", read=float, help="not served"),
    Flag(field="typical_acceptance_sampler_posterior_alpha", read=float, help="not served"),
    _switch("disable_logprobs_during_spec_decoding", "not served"),
)

_OBSERVABILITY = (
    _switch("disable_log_stats", "no statistics: neither log lines nor metrics"),
    Flag(field="otlp_traces_endpoint", help="not served"),
    Flag(field="collect_detailed_traces", help="not served"),
)

ENGINE_FLAGS: dict[str, tuple[Flag, ...]] = {
    "Model, tokenizer, weights": _MODEL,
    "Parallelism and device": _PARALLEL,
    "KV cache and memory": _CACHE,
    "Hybrid models": _HYBRID,
    "Scheduling": _SCHEDULING,
    "Execution": _EXECUTION,
    "Observability": _OBSERVABILITY,
    "Adapters (accepted by the parser, refused by the engine)": _ADAPTERS,
    "Speculative decoding (accepted by the parser, refused by the engine)": _SPECULATION,
}

ASYNC_FLAGS = (_switch("disable_log_requests", "no log line for each request"),)
