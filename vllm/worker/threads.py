"""Which processors a rank computes on.

Called once by the worker before torch does any work. Reads VLLM_CPU_OMP_THREADS_BIND through the
argument.
"""

from __future__ import annotations

import os

import torch

from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.platforms.cpu import parse_cpus

logger = init_logger(__name__)


def plan_threads(
    bind: str, rank: int, num_ranks: int, cpus: tuple[int, ...]
) -> tuple[tuple[int, ...], bool]:
    """Return the processors of a rank, and whether it is bound to them.

    Args:
        rank: which rank.
        num_ranks: of how many.
        bind: "all" shares the processors out without binding (one rank keeps what torch chose),
            "nobind" the same; else one list for each rank, separated by "|", as in "0-3|4-7".
        cpus: processors that the process may use.

    Raises:
        ConfigError: the text is malformed, has too few lists or names processors that are not
            there.
    """
    if bind in ("all", "nobind"):
        share = max(1, len(cpus) // num_ranks)
        start = min(rank * share, len(cpus) - share)
        return cpus[start : start + share], False
    lists = bind.split("|")
    allowed = f"'all', 'nobind' or {num_ranks} lists such as '0-3' separated by '|'"
    if len(lists) < num_ranks:
        raise ConfigError(
            f"VLLM_CPU_OMP_THREADS_BIND={bind!r} has {len(lists)} lists; allowed: {allowed}"
        )
    try:
        wanted = parse_cpus(lists[rank])
    except ValueError:
        raise ConfigError(
            f"VLLM_CPU_OMP_THREADS_BIND={bind!r} is not a list of processors; allowed: {allowed}"
        ) from None
    missing = [cpu for cpu in wanted if cpu not in cpus]
    if missing:
        raise ConfigError(
            f"VLLM_CPU_OMP_THREADS_BIND={bind!r} names processors {missing}, but this process may "
            f"use only {list(cpus)}"
        )
    return wanted, True


def apply_threads(bind: str, rank: int, num_ranks: int, cpus: tuple[int, ...]) -> None:
    """Give this process its threads; one rank that is not bound keeps torch's own choice."""
    mine, is_bound = plan_threads(bind, rank, num_ranks, cpus)
    if is_bound:
        os.sched_setaffinity(0, mine)
    if is_bound or num_ranks > 1:
        torch.set_num_threads(len(mine))
    logger.debug("rank %d computes with %d threads", rank, torch.get_num_threads())
