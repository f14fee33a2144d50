"""Which kernel was the fastest on this machine: the table that `vllm bench kernels --save` writes.

Read by the selector under "auto", once a process, and only where there is such a file. A table of
another version, torch or device counts as absent; one that cannot be read, as absent with a
warning. Never measures.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import torch

from vllm import envs
from vllm.attention.backends.abstract import KernelQuery
from vllm.errors import ConfigError
from vllm.logger import init_logger, warn_once
from vllm.platforms import get_platform
from vllm.types import DType
from vllm.version import __version__

logger = init_logger(__name__)

PHASE_WEIGHTS: Mapping[str, float] = {"decode": 0.75, "prefill": 0.25}
"""How much each phase counts in a rank: a served token is decoded, its prompt may be cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankKey:
    """What kernels are ranked for: layers of one key get one order."""

    head_size: int
    has_window: bool
    dtype: DType


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRanks:
    """The order of the kernels for one key.

    Attributes:
        relative_times: kernel -> its time beside that of the fastest in each cell, weighted over
            the phases; 1 is the fastest everywhere.
    """

    key: RankKey
    relative_times: dict[str, float]

    @property
    def order(self) -> tuple[str, ...]:
        """The kernels, fastest first."""
        return tuple(sorted(self.relative_times, key=self.relative_times.__getitem__))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineId:
    """What a table holds for; any difference makes it stale."""

    version: str
    torch: str
    device_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """One file."""

    machine: MachineId
    ranks: tuple[KernelRanks, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTimes:
    """Times of kernels at one load, in any unit; a kernel that failed is not there."""

    phase: Literal["decode", "prefill"]
    times: Mapping[str, float]


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a file that is read whatever its version."""

    machine: MachineId


def make_rank_key(query: KernelQuery) -> RankKey:
    """Return the key that a layer falls under."""
    return RankKey(
        head_size=query.head_size,
        has_window=bool(query.window or query.chunk_tokens),
        dtype=query.dtype,
    )


def rank_cells(key: RankKey, cells: Sequence[CellTimes]) -> KernelRanks:
    """Rank kernels over the cells of one key.

    A cell counts by the ratio to its fastest kernel, a phase by the geometric mean of its cells, so
    that neither long contexts nor large batches outweigh the rest. A kernel that lacks a cell which
    another has is left out.
    """
    kernels = [name for name in _list_names(cells) if all(name in c.times for c in cells)]
    phases = {cell.phase for cell in cells}
    total = sum(PHASE_WEIGHTS[phase] for phase in phases)
    relative: dict[str, float] = {}
    for name in kernels:
        logarithm = 0.0
        for phase in phases:
            ratios = [c.times[name] / min(c.times.values()) for c in cells if c.phase == phase]
            mean = sum(map(math.log, ratios)) / len(ratios)
            logarithm += PHASE_WEIGHTS[phase] / total * mean
        relative[name] = round(math.exp(logarithm), 4)
    return KernelRanks(key=key, relative_times=relative)


def _list_names(cells: Sequence[CellTimes]) -> list[str]:
    return list(dict.fromkeys(name for cell in cells for name in cell.times))


def read_measured_ranks(query: KernelQuery) -> tuple[str, ...]:
    """Return the kernels measured for such a layer on this machine, fastest first; () if none."""
    directory = find_directory()
    if not directory.is_dir():
        return ()
    table = _load_table(directory, query.device)
    if table is None:
        return ()
    key = make_rank_key(query)
    return next((ranks.order for ranks in table.ranks if ranks.key == key), ())


def save_ranks(device: str, ranks: Sequence[KernelRanks]) -> Path:
    """Write ranks into the table of this machine; keys that are not among them keep theirs.

    Raises:
        ConfigError: the directory cannot be written.
    """
    machine = identify_machine(device)
    directory = find_directory()
    path = directory / _name_file(machine.device_name)
    before = _read_table(path, machine)
    merged = {entry.key: entry for entry in (*(before.ranks if before else ()), *ranks)}
    content = msgspec.json.format(
        msgspec.json.encode(RankTable(machine=machine, ranks=tuple(merged.values()))), indent=2
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _replace_file(path, content)
    except OSError as cause:
        raise ConfigError(
            f"the kernel table cannot be written to {path}: {cause}; name another directory by "
            "VLLM_CACHE_ROOT"
        ) from cause
    _load_table.cache_clear()
    return path


def identify_machine(device: str) -> MachineId:
    """Return what a table of this process on such a device holds for."""
    return MachineId(
        version=__version__,
        torch=str(torch.__version__),
        device_name=get_platform(device).get_device_name(),
    )


def find_directory() -> Path:
    """Return where tables lie, one file for each device name."""
    return Path(envs.VLLM_CACHE_ROOT) / "kernels"


@cache
def _load_table(directory: Path, device: str) -> RankTable | None:
    machine = identify_machine(device)
    return _read_table(directory / _name_file(machine.device_name), machine)


def _read_table(path: Path, machine: MachineId) -> RankTable | None:
    try:
        content = path.read_bytes()
        found = msgspec.json.decode(content, type=_Header).machine
        if found != machine:
            logger.info(
                "%s was measured by %s with torch %s on %s and is not used; `vllm bench kernels "
                "--save` measures anew",
                path, found.version, found.torch, found.device_name,
            )  # fmt: skip
            return None
        return msgspec.json.decode(content, type=RankTable)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as cause:
        warn_once(
            logger,
            f"the kernel table {path} cannot be read ({cause}); kernels are taken in their "
            "built-in order. Delete it, or write it anew by `vllm bench kernels --save`",
        )
        return None


def _name_file(device_name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", device_name).strip("_") + ".json"


def _replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.replace(file.name, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
