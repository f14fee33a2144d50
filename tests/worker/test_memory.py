"""How much the cache may take, and on which processors a rank runs."""

from __future__ import annotations

import pytest

from vllm.attention.backends.long_prompts import MAX_JOINED_BYTES
from vllm.attention.layer import Attention
from vllm.cache_spec import CacheField, Full, LayerCacheSpec
from vllm.core.capacity import make_layout, make_uniform_groups
from vllm.errors import ConfigError, OutOfMemoryError
from vllm.platforms import get_platform
from vllm.platforms.cpu import parse_cpus
from vllm.types import DType
from vllm.worker.gpu_memory import count_scratch_bytes
from vllm.worker.gpu_model_runner import RunnerLimits
from vllm.worker.memory import (
    GIB,
    choose_cpu_cache_bytes,
    choose_gpu_cache_bytes,
    count_useful_bytes,
)
from vllm.worker.threads import plan_threads


def choose_gpu(others: float, fraction: float) -> tuple[float, str]:
    """C44: a card of 24 GiB, own peak 2 GiB; free is what others and we leave."""
    found, warning = choose_gpu_cache_bytes(
        total_bytes=24 * GIB,
        free_bytes=int((24 - others - 2) * GIB),
        own_peak_bytes=2 * GIB,
        utilization=fraction,
    )
    return found / GIB, warning


@pytest.mark.parametrize(
    ("others", "fraction", "expected", "warns"),
    [(0, 0.4, 7.6, False), (10, 0.4, 7.6, False), (18, 0.4, 4.0, True), (1, 1.0, 21.0, True)],
)
def test_the_memory_fraction_is_this_instances_share(
    others: float, fraction: float, expected: float, warns: bool
) -> None:
    found, warning = choose_gpu(others, fraction)
    assert found == pytest.approx(expected, abs=1e-6)
    assert bool(warning) == warns
    if warns:
        for number in (f"{fraction:g}", "24.00", "2.00", f"{expected:.2f} GiB are free"):
            assert number in warning


def test_no_memory_left_states_the_numbers() -> None:
    with pytest.raises(OutOfMemoryError, match=r"0\.05 of 24\.00 GiB .* 2\.00 GiB is -0\.80 GiB"):
        choose_gpu(0, 0.05)
    with pytest.raises(OutOfMemoryError):
        choose_gpu(22, 0.9)


@pytest.mark.parametrize(
    ("free", "useful", "ranks", "expected"),
    [(100, 50, 1, 4), (5, 50, 1, 2), (100, 1, 1, 1), (5, 50, 2, 1), (0, 50, 1, 0)],
)
def test_a_cpu_cache_is_modest_by_default(
    free: int, useful: int, ranks: int, expected: int
) -> None:
    found = choose_cpu_cache_bytes(
        wanted_bytes=None, free_bytes=free * GIB, useful_bytes=useful * GIB, num_ranks=ranks
    )
    assert found == expected * GIB


def test_a_cpu_cache_that_was_asked_for_is_given_or_refused() -> None:
    sizes = {"free_bytes": 10 * GIB, "useful_bytes": GIB}
    assert choose_cpu_cache_bytes(wanted_bytes=6 * GIB, **sizes) == 6 * GIB
    with pytest.raises(OutOfMemoryError, match=r"12\.00 GiB .* 10\.00 GiB"):
        choose_cpu_cache_bytes(wanted_bytes=12 * GIB, **sizes)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 256])
@pytest.mark.parametrize("max_model_len", [1, 17, 100, 2048, 8192])
@pytest.mark.parametrize("block_tokens", [1, 16, 128])
def test_useful_bytes_hold_every_sequence_at_full_length(
    max_num_seqs: int, max_model_len: int, block_tokens: int
) -> None:
    """What the worker calls enough is enough for the layout, with little to spare."""
    for layers, heads, size in ((1, 1, 32), (30, 3, 64), (48, 8, 128)):
        k, v = (CacheField(name=n, shape=(heads, size), dtype=DType.BFLOAT16) for n in "kv")
        specs = [LayerCacheSpec(layer=i, fields=(k, v), lifetime=Full()) for i in range(layers)]
        groups = make_uniform_groups(specs, block_tokens)
        useful_bytes = count_useful_bytes(
            block_bytes=groups[0].block_bytes,
            block_tokens=block_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        layout, report = make_layout(
            [groups], [useful_bytes], max_model_len=max_model_len, max_num_batched_tokens=512
        )
        assert max_num_seqs <= report.max_concurrency
        per_sequence = -(-max_model_len // block_tokens) * groups[0].block_bytes
        filled = per_sequence * max_num_seqs
        assert useful_bytes <= filled * 1.04 + 2 * groups[0].block_bytes
        assert layout.num_superblocks > 0


def test_threads_are_shared_out_or_bound() -> None:
    cpus = (0, 1, 2, 3, 4)
    assert plan_threads("all", 0, 2, cpus) == ((0, 1), False)
    assert plan_threads("all", 1, 2, cpus) == ((2, 3), False)
    assert plan_threads("all", 7, 8, (0, 1)) == ((1,), False)
    assert plan_threads("0-1|3,4", 1, 2, cpus) == ((3, 4), True)


@pytest.mark.parametrize("bind", ["0-1", "0-1|x", "0-1|9", "0-1|"])
def test_bad_thread_lists_are_clear_errors(bind: str) -> None:
    with pytest.raises(ConfigError, match="VLLM_CPU_OMP_THREADS_BIND"):
        plan_threads(bind, 1, 2, (0, 1, 2, 3))


def test_cpu_lists() -> None:
    assert parse_cpus("0-3, 6,2") == (0, 1, 2, 3, 6)


def test_the_cpu_platform_describes_this_machine() -> None:
    platform = get_platform("cpu")
    memory = platform.get_memory()
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert platform.get_device_name()
    assert platform.get_device_capability() is None
    with pytest.raises(ConfigError, match="'tpu'"):
        get_platform("tpu")


def test_what_prompts_that_go_on_copy_is_counted() -> None:
    layer = Attention(0, 8, 4, 256, 1.0, Full(), dtype=DType.BFLOAT16)
    token_bytes = 2 * 4 * 256 * 2

    def count(num_seqs: int, model_len: int, num_tokens: int, num_layers: int = 1) -> int:
        limits = RunnerLimits(
            max_num_seqs=num_seqs,
            max_model_len=model_len,
            max_num_batched_tokens=num_tokens,
            has_graphs=True,
        )
        return count_scratch_bytes([layer] * num_layers, limits)

    assert count(1, 32768, 8192) == 32768 * token_bytes
    assert count(4, 32768, 8192) == 4 * 32768 * token_bytes, "all of them may go on"
    assert count(4, 32768, 4) == 2 * 32768 * token_bytes, "with two new tokens each"
    assert count(1, 1 << 20, 8192) == MAX_JOINED_BYTES
    assert count(1, 32768, 8192, num_layers=3) == 32768 * token_bytes, "one layer after the other"
    assert count(1, 32768, 8192, num_layers=0) == 0
