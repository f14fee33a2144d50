"""Chooses the kernel of every layer, and keeps why each other kernel refused.

Called by the worker once after loading. Decides from queries, the kernel table, the ranks measured
on this machine and the probe alone.
A kernel that was asked for and cannot serve is replaced with one warning, or refused when `strict`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm import envs
from vllm.attention.backends.abstract import KernelQuery
from vllm.attention.backends.table import (
    FOREIGN_ENV_NAMES,
    KERNELS,
    KernelRow,
    find_package_fault,
    load_backend,
    rank_kernels,
)
from vllm.attention.measured_ranks import read_measured_ranks
from vllm.attention.probe import find_probe_fault
from vllm.errors import ConfigError, KernelError
from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)

AUTO = "auto"

FaultFinder = Callable[[str, KernelQuery], str | None]
"""Says what is wrong with a kernel that claims to serve a query, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """The kernel of one layer.

    Attributes:
        refusals: why each kernel that was tried before it does not serve the layer.
        note: why the kernel that was asked for was replaced, or empty.
    """

    kernel: str
    refusals: Mapping[str, str]
    note: str = ""


def read_env_kernel(device: str) -> str | None:
    """Return the kernel that VLLM_ATTENTION_BACKEND asks for, None if it is unset.

    Takes the names of 0.6.3 (case matters, as there) and the kernel names of this project.
    TORCH_SDPA on a CPU is the CPU's own kernel, as in 0.6.3.

    Raises:
        ConfigError: the name is in neither list.
    """
    given = envs.VLLM_ATTENTION_BACKEND
    if not given or given == AUTO:
        return None
    if given == "TORCH_SDPA" and device == "cpu":
        return "cpu"
    for row in KERNELS.values():
        if given == row.name or given in row.env_names:
            return row.name
    if given in FOREIGN_ENV_NAMES:
        return given
    ours = [name for row in KERNELS.values() for name in (*row.env_names, row.name)]
    raise ConfigError(
        f"VLLM_ATTENTION_BACKEND={given!r} is not the name of an attention backend; "
        f"allowed are {', '.join([AUTO, *ours])}. Unset it to let the engine choose."
    )


def resolve_kernels(
    queries: Mapping[int, KernelQuery],
    wanted: Mapping[int, str | None],
    *,
    strict: bool = False,
    find_fault: FaultFinder | None = None,
) -> dict[int, KernelChoice]:
    """Choose the kernel of every layer.

    Args:
        queries: what each layer asks for.
        wanted: the kernel named for each layer; None or "auto" lets the environment or the table
            choose.
        strict: refuse to replace a kernel that was named.
        find_fault: in the place of the probe.

    Raises:
        KernelError: no kernel serves a layer; a named one is broken; or `strict` and a named one
            does not serve its layer.
        ConfigError: a name is unknown.
    """
    choices: dict[int, KernelChoice] = {}
    decided: dict[tuple[KernelQuery, str | None], KernelChoice] = {}
    for layer, query in queries.items():
        name = wanted.get(layer)
        if name in (None, AUTO):
            name = read_env_kernel(query.device)
        key = (query, name)
        if key not in decided:
            decided[key] = choose_kernel(query, name, find_fault)
        choices[layer] = decided[key]
    _report_substitutes(choices, strict)
    return choices


def choose_kernel(
    query: KernelQuery, wanted: str | None, find_fault: FaultFinder | None = None
) -> KernelChoice:
    """Return the named kernel if it serves `query`, else the best one that does."""
    refusals: dict[str, str] = {}
    note = ""
    if wanted is not None:
        reason = find_kernel_refusal(wanted, query, is_named=True, find_fault=find_fault)
        if reason is None:
            return KernelChoice(kernel=wanted, refusals={})
        refusals[wanted] = reason
        note = f"{wanted}: {reason}"
    order = order_kernels(query)
    for name in order:
        if name in refusals:
            continue
        reason = find_kernel_refusal(name, query, find_fault=find_fault)
        if reason is None:
            logger.debug("%s takes %r of %s; refused: %s", query, name, order, refusals)
            return KernelChoice(kernel=name, refusals=refusals, note=note)
        refusals[name] = reason
    listed = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise KernelError(f"no attention kernel serves {query}: {listed}")


def order_kernels(query: KernelQuery) -> tuple[str, ...]:
    """Return what "auto" tries: kernels measured here, fastest first, then the built-in order."""
    built_in = rank_kernels(query.device)
    measured = [name for name in read_measured_ranks(query) if name in built_in]
    return (*measured, *(name for name in built_in if name not in measured))


def find_kernel_refusal(
    name: str,
    query: KernelQuery,
    *,
    is_named: bool = False,
    find_fault: FaultFinder | None = None,
) -> str | None:
    """Return None if a kernel serves `query` on this machine, else the reason.

    Args:
        name: the kernel.
        query: what a layer asks for.
        is_named: the user asked for it, so that a package that does not import is an error.
        find_fault: in the place of the probe.

    Raises:
        ConfigError: there is no such kernel.
        KernelError: a named one is broken.
    """
    if name in FOREIGN_ENV_NAMES:
        return "a backend of vLLM 0.6.3 that this project does not have"
    row = KERNELS.get(name)
    if row is None:
        raise ConfigError(
            f"unknown attention kernel {name!r}; allowed are {', '.join([AUTO, *KERNELS])}"
        )
    return (
        _find_missing(row, query, is_named=is_named)
        or load_backend(name).supports(query)
        or (find_fault or find_probe_fault)(name, query)
    )


def _find_missing(row: KernelRow, query: KernelQuery, *, is_named: bool) -> str | None:
    """Say what the machine lacks for a row.

    A kernel that was named has its package looked at whatever the device, so that a broken package
    ends the start instead of hiding behind a substitute.
    """
    wrong_device = None
    if query.device not in row.devices:
        wrong_device = f"it runs on {' or '.join(row.devices)}, the model is on {query.device}"
        if not is_named:
            return wrong_device
    fault = find_package_fault(row)
    if fault is not None:
        reason, is_broken = fault
        if is_broken and is_named:
            raise KernelError(
                f"attention kernel {row.name!r} was asked for, but {reason}. Install a build for "
                "this torch, uninstall the package, or let the engine choose (auto)."
            )
        if is_broken:
            warn_once(logger, f"attention kernel {row.name!r} is skipped: {reason}")
        return wrong_device or reason
    return wrong_device


def _report_substitutes(choices: Mapping[int, KernelChoice], strict: bool) -> None:
    replaced: dict[tuple[str, str], list[int]] = {}
    for layer, choice in choices.items():
        if choice.note:
            replaced.setdefault((choice.note, choice.kernel), []).append(layer)
    for (note, kernel), layers in replaced.items():
        listed = format_layers(layers)
        if strict:
            raise KernelError(
                f"layers {listed} cannot have the attention kernel that was asked for ({note}); "
                f"name another, {kernel!r} would do, or allow substitutes"
            )
        warn_once(logger, f"layers {listed}: attention kernel {note}; using {kernel!r} instead")


def format_layers(layers: list[int]) -> str:
    """Write a sorted list of layers as ranges: [0, 1, 2, 5] -> "0-2, 5"."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and parts[-1][1] == layer - 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in parts)
