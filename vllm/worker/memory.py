"""How many bytes the KV cache may take: pure functions of sizes.

Called by the worker after the weights are loaded. Asks no device; every number is an argument.
"""

from __future__ import annotations

from vllm.errors import OutOfMemoryError

GIB = 1 << 30
_DEFAULT_CPU_BYTES = 4 * GIB
_DEFAULT_CPU_SHARE = 0.4


def choose_cpu_cache_bytes(
    *, wanted_bytes: int | None, free_bytes: int, useful_bytes: int, num_ranks: int = 1
) -> int:
    """Return the bytes of one rank's cache on a CPU.

    Args:
        wanted_bytes: what the user asked for, for each rank; None or 0 lets the function choose.
        free_bytes: memory that is free once all ranks have loaded.
        useful_bytes: what all sequences at full length would fill; more is of no use.
        num_ranks: ranks that share the memory.

    Raises:
        OutOfMemoryError: the user asked for more than is free.
    """
    share = free_bytes // num_ranks
    if wanted_bytes:
        if wanted_bytes > share:
            raise OutOfMemoryError(
                f"a KV cache of {wanted_bytes / GIB:.2f} GiB was asked for, but only "
                f"{share / GIB:.2f} GiB are free for it; lower VLLM_CPU_KVCACHE_SPACE or free some"
            )
        return wanted_bytes
    return max(0, min(_DEFAULT_CPU_BYTES, int(share * _DEFAULT_CPU_SHARE), useful_bytes))


def choose_gpu_cache_bytes(
    *,
    total_bytes: int,
    free_bytes: int,
    own_peak_bytes: int,
    utilization: float,
    wanted_bytes: int | None = None,
) -> tuple[int, str]:
    """Return the bytes of one rank's cache on a GPU, and a warning or an empty text.

    The fraction is this instance's share of the whole card, as in 0.6.3, whatever others hold; but
    never more than is free, and never negative.

    Args:
        total_bytes: memory of the card.
        free_bytes: what is free right now, this instance's peak already taken.
        own_peak_bytes: weights and the largest step's activations of this instance.
        utilization: the memory fraction.
        wanted_bytes: what was asked for, whatever the fraction; None goes by the fraction.

    Raises:
        OutOfMemoryError: nothing is left, or less than was asked for; the message has the numbers.
    """
    if wanted_bytes:
        if wanted_bytes > free_bytes:
            raise OutOfMemoryError(
                f"a KV cache of {wanted_bytes / GIB:.2f} GiB was asked for, but only "
                f"{free_bytes / GIB:.2f} GiB of the card are free for it; ask for less or free some"
            )
        return wanted_bytes, ""
    budget = int(total_bytes * utilization) - own_peak_bytes
    numbers = (
        f"{utilization:g} of {total_bytes / GIB:.2f} GiB less this instance's peak of "
        f"{own_peak_bytes / GIB:.2f} GiB is {budget / GIB:.2f} GiB; "
        f"{free_bytes / GIB:.2f} GiB are free"
    )
    if min(budget, free_bytes) <= 0:
        raise OutOfMemoryError(
            f"no memory is left for the KV cache: {numbers}. Raise --gpu-memory-utilization, free "
            "memory on the card or use a smaller model"
        )
    if budget > free_bytes:
        return free_bytes, f"other processes hold part of the card: {numbers}; taking what is free"
    return budget, ""


def count_useful_bytes(
    *, block_bytes: int, block_tokens: int, max_num_seqs: int, max_model_len: int
) -> int:
    """Return what `max_num_seqs` sequences of `max_model_len` tokens fill.

    Counts whole blocks, and room for the superblock of pad blocks and the tail that is no
    superblock: the arena is cut into 64 or more of them, or into single blocks where it is small.
    """
    filled = -(-max_model_len // block_tokens) * max_num_seqs * block_bytes
    return filled + max(2 * block_bytes, filled // 31)
