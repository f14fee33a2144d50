"""From what the user asked to a complete, frozen configuration.

The one place where "auto" becomes a value and where flags are checked against each other and
against the checkpoint. Called by engine/arg_utils.py in the process of the caller; reads configs
and headers of weight files, never weights. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config.accepted import check_accepted
from vllm.config.cache import CacheConfig
from vllm.config.engine import (
    DecodingConfig,
    DeviceConfig,
    DummyConfig,
    EngineConfig,
    LoadConfig,
    ObservabilityConfig,
)
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.errors import ConfigError
from vllm.logger import init_logger, warn_once
from vllm.platforms.detect import find_cuda_fault, find_device, find_gpu_bytes
from vllm.transformers_utils.config import get_config, get_generation_config
from vllm.transformers_utils.dtype import checkpoint_dtype, resolve_dtype
from vllm.transformers_utils.gguf_file import is_gguf_file
from vllm.transformers_utils.hub import resolve_path
from vllm.transformers_utils.rope_config import context_len, normalize_rope

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)

_SERVED_DEVICES = ("cpu", "cuda")
_LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")
_DEFAULT_MAX_NUM_SEQS = 256
_DEFAULT_CONTEXT_LEN = 2048
# Tokens of a step: enough to fill the matrix units, few enough that streams do not stall. On two
# cores 512 prefills SmolLM2 within 5 % of 2048 (256: 12 % slower).
_CPU_BATCHED_TOKENS = 512
# Tokens of prompts in a step on a GPU, beside one for every sequence: decode rows would otherwise
# cut each long prompt a few tokens before its end. 8192 tokens of a 7B model take about a fifth of
# a second, which is how long a server's streams then stall. Offline nobody waits for the next
# token, and twice as many are worth up to 4 % for long prompts; they take about 1 GiB more.
_GPU_PROMPT_TOKENS = 8192
_OFFLINE_PROMPT_TOKENS = 16384
_LARGE_GPU_BYTES = 64 << 30


def resolve_engine_config(args: EngineArgs) -> EngineConfig:
    """Return the configuration that `args` asks for.

    Raises: ConfigError saying what was given, what is allowed and what to do.
    """
    check_accepted(args)
    device = _resolve_device(args.device)
    model = _resolve_model(args, device)
    scheduler = _resolve_scheduler(args, model, device)
    return EngineConfig(
        model_config=model,
        cache_config=_resolve_cache(args),
        parallel_config=_resolve_parallel(args, model),
        scheduler_config=scheduler,
        device_config=DeviceConfig(device=device),
        load_config=_resolve_load(args),
        decoding_config=DecodingConfig(),
        observability_config=ObservabilityConfig(log_stats=not args.disable_log_stats),
    )


def _resolve_device(requested: str) -> str:
    device = find_device() if requested == "auto" else requested
    if device not in _SERVED_DEVICES:
        raise ConfigError(
            f"device {requested!r} is not served by this version; allowed: auto, "
            f"{', '.join(_SERVED_DEVICES)}"
        )
    if device == "cuda" and (fault := find_cuda_fault()):
        raise ConfigError(f"device 'cuda' was asked for, but {fault}; use --device cpu, or auto")
    return device


def _resolve_model(args: EngineArgs, device: str) -> ModelConfig:
    path = resolve_path(args.model, revision=args.revision, download_dir=args.download_dir)
    config = get_config(
        args.model,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        download_dir=args.download_dir,
        without_torch=True,
    )
    if args.rope_scaling is not None or args.rope_theta is not None:
        _override_rope(config, args.rope_scaling, args.rope_theta)
    _check_quantization(args, path)
    names = args.served_model_name or args.model
    return ModelConfig(
        model=args.model,
        tokenizer=args.tokenizer or args.model,
        tokenizer_mode=args.tokenizer_mode,
        trust_remote_code=args.trust_remote_code,
        skip_tokenizer_init=args.skip_tokenizer_init,
        revision=args.revision,
        tokenizer_revision=args.tokenizer_revision or args.revision,
        dtype=resolve_dtype(args.dtype, checkpoint_dtype(config, path), device),
        seed=args.seed,
        hf_config=config,
        generation_config=get_generation_config(
            args.model, revision=args.revision, download_dir=args.download_dir
        ),
        max_model_len=_resolve_max_model_len(args, config),
        served_model_names=(names,) if isinstance(names, str) else tuple(names),
        max_logprobs=args.max_logprobs,
        enforce_eager=bool(args.enforce_eager),
    )


def _override_rope(
    config: dict[str, Any], scaling: Mapping[str, Any] | None, theta: float | None
) -> None:
    """Replace the rotary settings, where layer types differ those of the full layers."""
    if theta is not None and not 0 < theta < math.inf:
        raise ConfigError(f"rope_theta must be a number above 0, got {theta}")
    known = config.get("rope_parameters") or {}
    is_nested = bool(known) and "rope_type" not in known
    group = known.get("full_attention", {}) if is_nested else known
    changed = {
        **config,
        "rope_parameters": None,
        "rope_scaling": {
            **(group if scaling is None else scaling),
            "rope_theta": theta or group.get("rope_theta"),
        },
    }
    normalize_rope(changed)
    settings = changed["rope_parameters"]
    config["rope_parameters"] = {**known, "full_attention": settings} if is_nested else settings


def _check_quantization(args: EngineArgs, path: Path) -> None:
    is_gguf = path.is_file()
    if args.quantization not in (None, "gguf") or (args.quantization == "gguf" and not is_gguf):
        raise ConfigError(
            f"quantization {args.quantization!r} does not fit {args.model}; served are plain "
            "checkpoints (leave the flag out) and GGUF files"
        )
    if is_gguf and args.load_format not in ("auto", "gguf", "dummy"):
        raise ConfigError(
            f"{args.model} is a GGUF file, but load_format is {args.load_format!r}; leave it out"
        )


def _resolve_max_model_len(args: EngineArgs, config: Mapping[str, Any]) -> int:
    derived = context_len(config)
    if derived is None:
        warn_once(
            logger,
            f"the model's config names no length; {_DEFAULT_CONTEXT_LEN} is used, "
            "--max-model-len sets another",
        )
        derived = _DEFAULT_CONTEXT_LEN
    if args.disable_sliding_window and config.get("sliding_window"):
        derived = min(derived, int(config["sliding_window"]))
    wanted = args.max_model_len
    if wanted is None:
        return derived
    if wanted < 2:
        raise ConfigError(
            f"max_model_len must be at least 2 (a prompt token and an answer token), got {wanted}"
        )
    allowed = max(derived, int(config.get("model_max_length") or 0))
    if wanted > allowed and not envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN:
        raise ConfigError(
            f"max_model_len {wanted} exceeds the {allowed} tokens that the model's config "
            "promises; lower it, or set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 if you know that the model "
            "can do more"
        )
    return wanted


def _resolve_scheduler(args: EngineArgs, model: ModelConfig, device: str) -> SchedulerConfig:
    is_chunked = args.enable_chunked_prefill is not False
    max_num_seqs = args.max_num_seqs
    budget = args.max_num_batched_tokens
    if budget is None and is_chunked:
        budget = _choose_budget(args, device)
    elif budget is None:
        budget = max(model.max_model_len, 2048)
    if budget < 1 or max_num_seqs < 1:
        raise ConfigError(
            f"max_num_batched_tokens and max_num_seqs must be at least 1, got {budget} and "
            f"{max_num_seqs}"
        )
    if not is_chunked and budget < model.max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens ({budget}) is below max_model_len ({model.max_model_len}), so "
            "a whole prompt would not fit in a step; raise it, lower --max-model-len or leave "
            "chunked prefill on"
        )
    if budget < max_num_seqs:
        if max_num_seqs != _DEFAULT_MAX_NUM_SEQS:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) is below max_num_seqs ({max_num_seqs}), so a "
                "step could not serve every sequence; raise the first or lower the second"
            )
        max_num_seqs = budget
    if args.scheduling_policy not in ("fcfs", "priority"):
        raise ConfigError(
            f"scheduling_policy {args.scheduling_policy!r} is unknown; allowed: fcfs, priority"
        )
    if not 0 <= args.scheduler_delay_factor < math.inf:
        raise ConfigError(
            "scheduler_delay_factor must be a number that may not be negative, got "
            f"{args.scheduler_delay_factor}"
        )
    return SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=model.max_model_len,
        policy=args.scheduling_policy,
        enable_chunked_prefill=is_chunked,
        delay_factor=args.scheduler_delay_factor,
        # A CPU plans on the cores that compute: nothing would be gained.
        max_steps_in_flight=2 if device == "cuda" and not args.disable_async_output_proc else 1,
    )


def _choose_budget(args: EngineArgs, device: str) -> int:
    """Return the default token budget of a step where prompts may be cut."""
    if device == "cpu":
        return _CPU_BATCHED_TOKENS
    is_large = not args.has_streams and find_gpu_bytes() >= _LARGE_GPU_BYTES
    num_tokens = _OFFLINE_PROMPT_TOKENS if is_large else _GPU_PROMPT_TOKENS
    return num_tokens + max(args.max_num_seqs, 0)


def _resolve_cache(args: EngineArgs) -> CacheConfig:
    if args.block_size < 1:
        raise ConfigError(f"block_size must be at least 1, got {args.block_size}")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise ConfigError(
            "gpu_memory_utilization must be above 0 and at most 1, got "
            f"{args.gpu_memory_utilization}"
        )
    if args.num_gpu_blocks_override is not None and args.num_gpu_blocks_override < 1:
        raise ConfigError(
            f"num_gpu_blocks_override must be at least 1, got {args.num_gpu_blocks_override}"
        )
    if args.kv_cache_dtype != "auto":
        raise ConfigError(
            f"kv_cache_dtype {args.kv_cache_dtype!r} is not served by this version; allowed: auto"
        )
    return CacheConfig(
        block_size=args.block_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        num_gpu_blocks_override=args.num_gpu_blocks_override,
        swap_space_bytes=int(args.swap_space * 2**30),
        enable_prefix_caching=args.enable_prefix_caching is not False,
    )


def _resolve_parallel(args: EngineArgs, model: ModelConfig) -> ParallelConfig:
    size = args.tensor_parallel_size
    if size < 1 or args.pipeline_parallel_size != 1:
        raise ConfigError(
            f"tensor_parallel_size must be at least 1 and pipeline_parallel_size 1, got {size} and "
            f"{args.pipeline_parallel_size}"
        )
    num_heads = model.hf_config.get("num_attention_heads")
    if num_heads is not None and num_heads % size:
        raise ConfigError(
            f"tensor_parallel_size {size} does not divide the model's {num_heads} attention heads"
        )
    backend = "ray" if args.worker_use_ray else args.distributed_executor_backend
    if backend == "ray":
        raise ConfigError(
            "distributed_executor_backend 'ray' is not served by this version; allowed: mp, or "
            "unset"
        )
    return ParallelConfig(
        tensor_parallel_size=size,
        distributed_executor_backend=backend or ("mp" if size > 1 else None),
        disable_custom_all_reduce=args.disable_custom_all_reduce,
    )


def _resolve_load(args: EngineArgs) -> LoadConfig:
    if args.load_format not in _LOAD_FORMATS:
        raise ConfigError(
            f"load_format {args.load_format!r} is not served; allowed: {', '.join(_LOAD_FORMATS)}"
        )
    patterns = args.ignore_patterns or ()
    options = args.model_loader_extra_config or {}
    load_format = args.load_format
    if load_format == "auto" and is_gguf_file(Path(args.model).expanduser()):
        load_format = "gguf"
    return LoadConfig(
        load_format=load_format,
        download_dir=args.download_dir,
        ignore_patterns=(patterns,) if isinstance(patterns, str) else tuple(patterns),
        dummy=_resolve_dummy(options if load_format == "dummy" else {}),
    )


def _resolve_dummy(given: Mapping[str, Any] | str) -> DummyConfig:
    """Read the options of made-up weights: "range", a number; "norms" and "seed", words."""
    options: Any = given
    if isinstance(given, str):
        try:
            options = json.loads(given)
        except ValueError as error:
            raise ConfigError(
                f"model_loader_extra_config is no JSON: {given!r} ({error})"
            ) from error
    if not isinstance(options, Mapping) or options.keys() - {"range", "norms", "seed"}:
        raise ConfigError(
            f"model_loader_extra_config is {given!r}; for load_format dummy it is an object with "
            "the keys range, norms and seed"
        )
    value_range = options.get("range", DummyConfig().value_range)
    if type(value_range) not in (int, float) or not 0 < value_range < math.inf:
        raise ConfigError(
            f"model_loader_extra_config: range is {value_range!r}; give a number above 0"
        )
    norms, seed = options.get("norms", "random"), options.get("seed", "one")
    if norms not in ("one", "random"):
        raise ConfigError(
            f"model_loader_extra_config: norms is {norms!r}; allowed: one (they do nothing), random"
        )
    if seed not in ("one", "name"):
        raise ConfigError(
            f"model_loader_extra_config: seed is {seed!r}; allowed: one (every tensor begins with "
            "the same numbers), name (each has its own)"
        )
    return DummyConfig(
        value_range=float(value_range),
        has_random_norms=norms == "random",
        has_one_seed=seed == "one",
    )
