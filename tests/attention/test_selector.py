"""Which kernel a layer gets, why the others refused, and what the user is told."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from vllm import logger as logging_module
from vllm.attention import selector
from vllm.attention.backends import table
from vllm.attention.backends.abstract import AttentionBackend, KernelQuery, find_refusal
from vllm.attention.backends.cpu import CpuBackend
from vllm.attention.backends.table import KERNELS, load_backend, rank_kernels
from vllm.cache_spec import BLOCK_ALIGNMENT_BYTES
from vllm.errors import ConfigError, KernelError
from vllm.types import DType

QUERY = KernelQuery(
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    dtype=DType.FLOAT32,
    kv_dtype=DType.FLOAT32,
    scale=0.125,
)
PACKAGES = {row.name: row.package for row in KERNELS.values() if row.package}


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging_module, "_said", set())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)


def resolve(wanted: str | None = None, strict: bool = False, **fields: object):
    queries = {i: dataclasses.replace(QUERY, **fields) for i in range(4)}
    return selector.resolve_kernels(queries, dict.fromkeys(queries, wanted), strict=strict)[0]


def test_auto_takes_the_compiled_kernel_on_a_cpu() -> None:
    assert resolve().kernel == resolve("auto").kernel == "cpu"


def test_auto_goes_on_to_the_next_and_keeps_why(caplog: pytest.LogCaptureFixture) -> None:
    choice = resolve(head_size=20)
    assert choice.kernel == "torch"
    assert "head_size=20" in choice.refusals["cpu"]
    assert not caplog.records, "nobody asked for the kernel that refused"


@pytest.mark.parametrize("name", [n for n, row in KERNELS.items() if "cpu" not in row.devices])
def test_gpu_kernels_are_replaced_on_a_cpu_with_one_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    choice = resolve(name)
    assert choice.kernel == "cpu"
    assert "cuda" in choice.refusals[name] or "not installed" in choice.refusals[name]
    [record] = caplog.records
    for part in ("layers 0-3", name, choice.refusals[name], "'cpu'"):
        assert part in record.getMessage()
    with pytest.raises(KernelError, match="layers 0-3"):
        resolve(name, strict=True)


def test_a_layer_that_its_kernel_cannot_serve_is_named(caplog: pytest.LogCaptureFixture) -> None:
    queries = {
        i: dataclasses.replace(QUERY, head_size=24 if i in (1, 2, 5) else 64) for i in range(6)
    }
    choices = selector.resolve_kernels(queries, dict.fromkeys(queries, "cpu"))
    assert [choices[i].kernel for i in range(6)] == ["cpu", "torch", "torch", "cpu", "cpu", "torch"]
    assert "layers 1-2, 5" in caplog.records[0].getMessage()


def test_nothing_serves() -> None:
    with pytest.raises(KernelError, match=r"cpu: .*torch: .*float8"):
        resolve(kv_dtype=DType.FLOAT8_E4M3)


def test_an_unknown_name_lists_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"'flashattn7'.*flashattn3"):
        resolve("flashattn7")


@pytest.mark.parametrize(
    ("given", "expected"),
    [("TORCH_SDPA", "cpu"), ("torch", "torch"), ("cpu", "cpu"), ("auto", "cpu"), ("", "cpu")],
)
def test_environment_names(monkeypatch: pytest.MonkeyPatch, given: str, expected: str) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", given)
    assert resolve().kernel == expected


@pytest.mark.parametrize("given", ["FLASH_ATTN", "XFORMERS", "FLASHINFER", "PALLAS"])
def test_environment_names_of_other_machines_warn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", given)
    assert resolve().kernel == "cpu"
    assert len(caplog.records) == 1
    assert resolve("torch").kernel == "torch", (
        "a kernel named for a layer goes before the environment"
    )


@pytest.mark.parametrize("given", ["flash_attn", "FLASH", "Torch"])
def test_unknown_environment_names_are_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", given)
    with pytest.raises(ConfigError, match="XFORMERS"):
        resolve()


@pytest.fixture(params=sorted(PACKAGES))
def broken(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """C43: the optional package of a kernel is built for another torch; returns the kernel."""
    import_name, distribution = PACKAGES[request.param]
    (tmp_path / f"{import_name}.py").write_text(
        "raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEi')"
    )
    info = tmp_path / f"{distribution.replace('-', '_')}-2.7.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.7.3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, import_name, raising=False)
    return request.param


def test_a_broken_package_is_skipped_with_one_warning(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        choice = resolve(device="cuda", capability=(9, 0))
    assert choice.kernel == "torch"
    about = [r.getMessage() for r in caplog.records if PACKAGES[broken][1] in r.getMessage()]
    assert len(about) == 1
    for part in (repr(broken), "2.7.3", "undefined symbol: _ZN3c104cuda9SetDeviceEi"):
        assert part in about[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_broken_package_that_was_asked_for_ends_the_start(broken: str, device: str) -> None:
    with pytest.raises(KernelError) as caught:
        resolve(broken, device=device)
    for part in (repr(broken), "2.7.3", "undefined symbol"):
        assert part in str(caught.value)


def test_importing_the_engine_imports_no_optional_package() -> None:
    modules = __import__("sys").modules
    assert not {"flash_attn", "flash_attn_interface", "xformers"} & set(modules)


def test_a_field_without_a_rule_means_no() -> None:
    rules = {field.name: lambda q: True for field in dataclasses.fields(KernelQuery)}
    del rules["soft_cap"]
    assert find_refusal(QUERY, rules) is None
    refusal = find_refusal(dataclasses.replace(QUERY, soft_cap=30.0), rules)
    assert refusal == "soft_cap=30.0 is not known to it"


def resolve_with(backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch):
    """Choose a kernel with a backend in the place of `cpu`."""
    known = load_backend
    monkeypatch.setattr(
        "vllm.attention.probe.load_backend", lambda n: backend if n == "cpu" else known(n)
    )
    selector.find_probe_fault.cache_clear()
    try:
        return resolve()
    finally:
        selector.find_probe_fault.cache_clear()


def test_a_kernel_that_fails_the_probe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(CpuBackend):
        def forward(self, out_THD, *rest):
            super().forward(out_THD, *rest)
            out_THD[0] += 0.01

    choice = resolve_with(Wrong(), monkeypatch)
    assert choice.kernel == "torch"
    assert "probe" in choice.refusals["cpu"]


def test_a_kernel_that_takes_blocks_for_neighbours_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It finds a block by its number alone, as if an arena had one group and no gaps (trap 20)."""

    class Dense(CpuBackend):
        def forward(self, out_THD, query_THD, key_THD, value_THD, cache, batch, plan, params):
            (group,), row = batch.groups, cache.tensors[0][0]
            block_units = 2 * row.numel() * row.element_size() // BLOCK_ALIGNMENT_BYTES
            offsets = group.block_offsets // block_units * block_units
            group = dataclasses.replace(group, block_offsets=offsets)
            batch = dataclasses.replace(batch, groups=(group,))
            super().forward(out_THD, query_THD, key_THD, value_THD, cache, batch, plan, params)

    choice = resolve_with(Dense(), monkeypatch)
    assert "the probe of strided caches" in choice.refusals["cpu"]


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_rows_resolve_to_backends_of_their_name(name: str) -> None:
    assert load_backend(name).name == name


def test_each_device_has_a_last_resort() -> None:
    assert rank_kernels("cpu")[-1] == rank_kernels("cuda")[-1] == "torch"
    assert set(rank_kernels("cpu")) | set(rank_kernels("cuda")) == set(KERNELS)


def test_a_kernel_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(KernelError, match="not part of this version"):
        table.load_backend("unknown")


GPU = dataclasses.replace(
    QUERY, device="cuda", capability=(9, 0), dtype=DType.BFLOAT16, kv_dtype=DType.BFLOAT16
)
REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("triton", {"capability": (7, 5)}, "below"),
    ("triton", {"head_size": 648}, "head_size"),
    ("triton", {"kv_dtype": DType.FLOAT8_E4M3}, "kv_dtype"),
    ("flashattn3", {"capability": (8, 0)}, "9.x"),
    ("flashattn3", {"sink_tokens": 4}, "sink_tokens"),
    ("flashattn", {"dtype": DType.FLOAT32}, "dtype"),
    ("flashattn", {"head_size": 576}, "head_size"),
    ("flashattn", {"has_one_field": True}, "has_one_field"),
    ("flashattn", {"has_sink_logits": True}, "has_sink_logits"),
    ("xformers", {"window": 128}, "window"),
    ("xformers", {"soft_cap": 30.0}, "soft_cap"),
    ("xformers", {"chunk_tokens": 64}, "chunk_tokens"),
]


@pytest.mark.parametrize(("name", "fields", "reason"), REFUSED)
def test_gpu_kernels_refuse_what_they_cannot(
    monkeypatch: pytest.MonkeyPatch, name: str, fields: dict[str, object], reason: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    backend = load_backend(name)
    assert backend.supports(GPU) is None
    assert reason in (backend.supports(dataclasses.replace(GPU, **fields)) or "")


@pytest.mark.parametrize("name", ["triton", "flashattn", "flashattn3", "xformers"])
def test_gpu_kernels_refuse_without_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no CUDA device" in (load_backend(name).supports(GPU) or "")
