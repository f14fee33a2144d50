"""The saved order of kernels: who follows it, and what becomes of a table that cannot be used."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm import logger as logging_module
from vllm.attention import measured_ranks
from vllm.attention.backends.abstract import KernelQuery
from vllm.attention.measured_ranks import (
    KernelRanks,
    find_directory,
    identify_machine,
    make_rank_key,
    read_measured_ranks,
    save_ranks,
)
from vllm.attention.selector import choose_kernel, order_kernels
from vllm.errors import ConfigError
from vllm.types import DType

QUERY = KernelQuery(
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    dtype=DType.FLOAT32,
    kv_dtype=DType.FLOAT32,
    scale=0.125,
)
TORCH_FIRST = {"torch": 1.0, "cpu": 2.5}


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)
    monkeypatch.setattr(logging_module, "_said", set())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    measured_ranks._load_table.cache_clear()
    yield
    measured_ranks._load_table.cache_clear()


def save(query: KernelQuery = QUERY, times: dict[str, float] = TORCH_FIRST) -> Path:
    return save_ranks("cpu", [KernelRanks(key=make_rank_key(query), relative_times=times)])


def test_no_table_is_the_built_in_order() -> None:
    assert read_measured_ranks(QUERY) == ()
    assert order_kernels(QUERY) == ("cpu", "torch")


def test_auto_takes_what_was_measured_fastest(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="vllm")
    save()
    assert read_measured_ranks(QUERY) == ("torch", "cpu")
    assert choose_kernel(QUERY, None).kernel == "torch"
    assert "takes 'torch' of ('torch', 'cpu')" in caplog.text
    assert choose_kernel(QUERY, "cpu").kernel == "cpu", "a name wins over a table"


@pytest.mark.parametrize(
    "fields",
    [{"head_size": 128}, {"window": 16}, {"chunk_tokens": 16}, {"dtype": DType.BFLOAT16}],
)
def test_other_layers_keep_the_built_in_order(fields: dict[str, object]) -> None:
    save()
    other = dataclasses.replace(QUERY, **fields)
    assert order_kernels(other) == ("cpu", "torch")
    save(other)
    assert order_kernels(other) == order_kernels(QUERY) == ("torch", "cpu"), "keys are merged"


def test_kernels_that_were_not_measured_come_last() -> None:
    save(times={"torch": 1.0, "gone": 0.5})
    assert order_kernels(QUERY) == ("torch", "cpu")


@pytest.mark.parametrize("field", ["version", "torch", "device_name"])
def test_a_stale_table_is_not_used(field: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm")
    path = save()
    content = json.loads(path.read_text())
    content["machine"][field] = "another"
    content["ranks"] = "a format of later"
    path.write_text(json.dumps(content))
    assert order_kernels(QUERY) == order_kernels(QUERY) == ("cpu", "torch")
    [record] = caplog.records
    assert record.levelno == logging.INFO
    assert "another" in record.getMessage()
    save()
    assert order_kernels(QUERY) == ("torch", "cpu")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b'{"machine": {}}', b'{"machine": 3, "ranks": []}']
)
def test_an_unreadable_table_gives_one_warning(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = save()
    path.write_bytes(content)
    measured_ranks._load_table.cache_clear()
    assert order_kernels(QUERY) == order_kernels(QUERY) == ("cpu", "torch")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()


def test_wrong_ranks_of_this_machine_give_the_warning_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = save()
    machine = dataclasses.asdict(identify_machine("cpu"))
    path.write_text(json.dumps({"machine": machine, "ranks": [{"key": 1}]}))
    assert order_kernels(QUERY) == ("cpu", "torch")
    assert len(caplog.records) == 1


def test_the_file_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    path = save()
    assert order_kernels(QUERY) == ("torch", "cpu")
    path.unlink()
    assert order_kernels(QUERY) == ("torch", "cpu")


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    find_directory().write_text("a file where the directory should be")
    with pytest.raises(ConfigError, match="VLLM_CACHE_ROOT"):
        save()
