"""Builds a model and fills it with its weights.

Called by the worker, once a rank. Resolves the class, refuses a model that does not fit into memory
before anything is read, lets the model take its weights, and reports what was used and what was
not. Never looks into files or at names of tensors.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from vllm.config import LoadConfig, ModelConfig
from vllm.distributed.parallel_state import TensorParallel
from vllm.errors import ConfigError, OutOfMemoryError
from vllm.logger import init_logger
from vllm.model_executor.model_loader.dummy import iterate_dummy
from vllm.model_executor.model_loader.weights import iterate_weights
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.interfaces import TextModel
from vllm.model_executor.models.weight_map import LoadReport, expand_rows
from vllm.platforms import get_platform
from vllm.types import DType
from vllm.utils.tensors import to_torch_dtype

logger = init_logger(__name__)

_GIB = 1 << 30
_MAX_NAMED = 20


def get_model_architecture(model_config: ModelConfig) -> tuple[type[nn.Module], str]:
    """Return the class that serves a model, and the architecture name that chose it.

    Raises:
        ConfigError: no architecture of the checkpoint is known; the message lists those that are.
    """
    return ModelRegistry.resolve_model_cls(model_config.architectures)


def load_model(
    model_config: ModelConfig,
    load_config: LoadConfig,
    device: torch.device,
    tp: TensorParallel,
    *,
    cache_dtype: DType | None = None,
) -> nn.Module:
    """Build a model on `device`, load its weights and make it ready to run.

    Args:
        model_config: which model, in which element type.
        load_config: in which format its files are.
        device: where the weights go.
        tp: the ranks that share the model; this one takes its part.
        cache_dtype: element type of K and V in the cache; None is the model's.

    Returns:
        The model (see models/interfaces.py), in eval mode, `finish_loading` done.

    Raises:
        ConfigError: an architecture or a config that cannot be served.
        OutOfMemoryError: the weights do not fit into the memory that is free.
        WeightError: files that are missing, broken or of another model.
    """
    started_s = time.perf_counter()
    dtype = to_torch_dtype(model_config.dtype)
    cls, architecture = get_model_architecture(model_config)

    def build(place: torch.device) -> nn.Module:
        with place:
            return cls(
                model_config.hf_config,
                dtype=dtype,
                tp=tp,
                cache_dtype=cache_dtype,
                max_model_len=model_config.max_model_len,
            )

    weight_bytes = check_memory(build(torch.device("meta")), model_config, device, tp)
    model = build(device)
    text_model = cast(TextModel, model)  # what the registry promises of its classes
    report = _fill(text_model, model_config, load_config, dtype, device, tp)
    if tp.rank == 0:  # every rank reads the same files
        log_report(report, model_config.model)
    text_model.finish_loading()
    logger.info(
        "Loaded %s (%s): %d tensors, %.2f GiB of %s weights in %.2f s",
        architecture,
        model_config.model,
        len(report.used),
        weight_bytes / _GIB,
        model_config.dtype.value,
        time.perf_counter() - started_s,
    )
    return model.eval()


def _fill(
    model: TextModel,
    model_config: ModelConfig,
    load_config: LoadConfig,
    dtype: torch.dtype,
    device: torch.device,
    tp: TensorParallel,
) -> LoadReport:
    weights: Iterable[tuple[str, Tensor]]
    if load_config.load_format == "dummy":
        if not isinstance(model, CausalLM):
            raise ConfigError(
                f"load_format dummy needs a model that names its weights; {type(model).__name__} "
                "does not (derive it from CausalLM)."
            )
        targets = expand_rows(model.weight_rows, model)
        places = {name: t.module.place(t.field, t.shard) for name, t in targets.items()}
        weights = iterate_dummy(places, dtype, device, load_config.dummy)
    else:
        use_tqdm = load_config.use_tqdm and tp.rank == 0
        weights = iterate_weights(model_config, load_config, dtype, use_tqdm=use_tqdm)
    with torch.no_grad(), _one_torch_thread():
        return model.load_weights(weights)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Copy on the calling thread: memory is the limit, and waking threads each time is not free.

    The readers have threads of their own for what takes arithmetic.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def check_memory(
    skeleton: nn.Module, model_config: ModelConfig, device: torch.device, tp: TensorParallel
) -> int:
    """Return the bytes of a model's weights on this rank, if there is room for them.

    Args:
        skeleton: the model built on the meta device, which takes no memory.
        model_config: for its name and element type.
        device: where the weights are to go; ranks on CPUs share one memory.
        tp: how many ranks will ask for as much.

    Raises:
        OutOfMemoryError: the weights are larger than the memory that is free.
    """
    sizes = [t.numel() * t.element_size() for t in (*skeleton.parameters(), *skeleton.buffers())]
    weight_bytes = sum(sizes)
    num_sharing = tp.size if device.type == "cpu" else 1
    # One weight at a time is held twice, while it is brought into the kernels' layout.
    needed_bytes = (weight_bytes + max(sizes, default=0)) * num_sharing
    memory = get_platform(device.type).get_memory(device.index or 0)
    if needed_bytes > memory.free_bytes:
        raise OutOfMemoryError(
            f"{model_config.model} needs {needed_bytes / _GIB:.2f} GiB of memory while it is "
            f"loaded in {model_config.dtype.value} (its weights alone "
            f"{weight_bytes * num_sharing / _GIB:.2f} GiB), but {memory.free_bytes / _GIB:.2f} GiB "
            f"of {memory.total_bytes / _GIB:.2f} GiB are free. Use a smaller model or type."
        )
    return weight_bytes


def log_report(report: LoadReport, model: str) -> None:
    """Say once which tensors of the files were not needed, and which nobody knows."""
    for why, count in Counter(report.ignored.values()).items():
        logger.info("%s: %d tensor(s) not needed: %s", model, count, why)
    if report.unused:
        shown = ", ".join(report.unused[:_MAX_NAMED])
        more = len(report.unused) - _MAX_NAMED
        logger.warning(
            "%s: %d tensor(s) of the files are unknown to the model and not used: %s%s",
            model,
            len(report.unused),
            shown,
            f" and {more} more" if more > 0 else "",
        )
