"""The layers of a loaded model on one rank: what they keep and which kernel serves each.

Called by the worker between loading and its report. Binds a kernel to every attention layer;
allocates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm.attention.backends.abstract import KernelQuery
from vllm.attention.backends.table import load_backend
from vllm.attention.layer import Attention
from vllm.attention.selector import FaultFinder, resolve_kernels
from vllm.cache_spec import KVCacheGroup, LayerCacheSpec
from vllm.config import EngineConfig
from vllm.hybrid.apply import limit_layers, name_specs
from vllm.hybrid.grouping import group_layers
from vllm.hybrid.reach import find_last_keeper, find_reaches
from vllm.model_executor.models.interfaces import TextModel
from vllm.platforms.interface import Platform
from vllm.worker.cut_batch import NO_CUTS, CutPoints
from vllm.worker.hybrid_cache import count_hybrid_bytes
from vllm.worker.report import LayerKernel

_BLOCK_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSetup:
    """What the layers of a rank came to.

    Attributes:
        specs: what each decoder layer keeps, sizes of this rank.
        kernels: kernel of each attention layer.
        block_tokens: block sizes in tokens that the kernels of all layers take.
        cuts: where tokens of prompts stay behind.
    """

    specs: tuple[LayerCacheSpec, ...] = ()
    kernels: tuple[LayerKernel, ...] = ()
    block_tokens: tuple[int, ...] = ()
    cuts: CutPoints = NO_CUTS

    @property
    def kernel_names(self) -> dict[int, str]:
        """Layer index -> kernel."""
        return {choice.layer: choice.kernel for choice in self.kernels}


def prepare_queries(
    model: TextModel, config: EngineConfig, platform: Platform
) -> dict[int, KernelQuery]:
    """Tell the attention layers their policies; return what each then asks of a kernel."""
    layers: dict[int, Attention] = dict(model.attention_layers())
    limit_layers(layers, config.hybrid.policies)
    capability = platform.get_device_capability()
    return {
        layer: replace(
            attention.query,
            block_tokens=_choose_block_tokens(config, layer),
            device=platform.device_type,
            capability=capability,
        )
        for layer, attention in layers.items()
    }


def set_up_layers(
    model: TextModel,
    config: EngineConfig,
    platform: Platform,
    find_fault: FaultFinder | None = None,
) -> LayerSetup:
    """Choose and bind the kernel of each attention layer.

    Args:
        model: loaded.
        config: of the engine.
        platform: that of the model's device.
        find_fault: in the place of the probe of kernels.

    Raises:
        KernelError: no kernel serves a layer.
        ConfigError: a layer cannot keep what is asked of it.
    """
    queries = prepare_queries(model, config, platform)
    layers: dict[int, Attention] = dict(model.attention_layers())
    specs = name_specs(model.cache_specs(), config.hybrid.policies)
    choices = resolve_kernels(
        queries,
        {layer: attention.layer_impl for layer, attention in layers.items()},
        strict=config.hybrid.is_strict,
        find_fault=find_fault,
    )
    for layer, choice in choices.items():
        layers[layer].bind(choice.kernel)
    kernels = {layer: choice.kernel for layer, choice in choices.items()}
    sizes = {*_BLOCK_TOKENS, config.cache_config.block_size, *config.hybrid.block_sizes}
    return LayerSetup(
        specs=specs,
        kernels=tuple(
            LayerKernel(layer=layer, kernel=choice.kernel, note=choice.note)
            for layer, choice in choices.items()
        ),
        block_tokens=_list_block_tokens(queries, kernels, sorted(sizes)),
        cuts=CutPoints(
            reaches=find_reaches(specs),
            last_keeper=find_last_keeper(specs, {i: query.window for i, query in queries.items()}),
        ),
    )


def list_groups(specs: Sequence[LayerCacheSpec], config: EngineConfig) -> tuple[KVCacheGroup, ...]:
    """Return the groups that the layers fall into on this rank."""
    return group_layers(specs, config.hybrid, config.cache_config.block_size)


def count_full_bytes(specs: Sequence[LayerCacheSpec], config: EngineConfig) -> int:
    """Return the bytes of cache that as many sequences as may run fill at their full length."""
    scheduler = config.scheduler_config
    return count_hybrid_bytes(
        list_groups(specs, config),
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=scheduler.max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
    )


def _choose_block_tokens(config: EngineConfig, layer: int) -> int:
    policies = config.hybrid.policies
    own_size = policies[layer].block_tokens if policies else None
    return own_size or config.cache_config.block_size


def _list_block_tokens(
    queries: Mapping[int, KernelQuery], kernels: Mapping[int, str], sizes: Sequence[int]
) -> tuple[int, ...]:
    """Return those of `sizes` that the chosen kernel of every layer takes."""
    pairs = {(kernels[layer], query) for layer, query in queries.items()}
    return tuple(
        size
        for size in sizes
        if all(
            load_backend(kernel).supports(replace(query, block_tokens=size)) is None
            for kernel, query in pairs
        )
    )
