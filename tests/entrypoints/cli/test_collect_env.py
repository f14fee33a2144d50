"""`vllm collect-env`: rows, mends, and faults that are made up."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest

from tests.utils.source_tree import ROOT
from vllm.entrypoints.cli import collect_env
from vllm.entrypoints.cli.collect_env import Row
from vllm.scripts import main


def find(rows: Any, name: str) -> Row:
    """The row of a name."""
    return next(row for row in rows if row.name == name)


def make_torch(cuda: str | None, *, is_available: bool) -> Any:
    """A stand-in for torch with what is looked at."""
    facts = types.SimpleNamespace(name="A100", major=8, minor=0, total_memory=80 << 30)
    return types.SimpleNamespace(
        __version__="2.13.0",
        version=types.SimpleNamespace(cuda=cuda),
        backends=types.SimpleNamespace(cudnn=types.SimpleNamespace(version=lambda: 90100)),
        cuda=types.SimpleNamespace(
            is_available=lambda: is_available,
            get_arch_list=lambda: ["sm_80", "sm_90"],
            device_count=lambda: 1,
            get_device_properties=lambda index: facts,
        ),
    )


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["collect-env", "--json"])
    rows = [Row(**row) for row in json.loads(capsys.readouterr().out)]
    assert find(rows, "torch").status == "ok"
    assert find(rows, "compiled ops").status == "ok", find(rows, "compiled ops")
    assert status == int(any(row.status == "wrong" for row in rows))
    assert main(["collect-env"]) == status
    assert "compiled ops" in capsys.readouterr().out


def test_gpu_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "_find_driver", lambda: "580.1")
    rows = list(collect_env._check_torch(make_torch("13.0", is_available=True)))
    for name in ("cuda driver", "cuda runtime", "cudnn", "gpu 0"):
        assert find(rows, name).status == "ok"


@pytest.mark.parametrize(("version", "is_known"), [("3.6.0", True), ("3.7.1", False)])
def test_another_triton_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str, is_known: bool
) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version))
    row = find(collect_env._check_torch(make_torch("13.0", is_available=True)), "triton")
    assert (row.status, row.found) == ("ok", version)
    assert bool(row.mend) != is_known


def test_triton_that_is_known_is_the_one_that_is_pinned() -> None:
    pin = (ROOT / "requirements" / "triton.txt").read_text().splitlines()[-1]
    assert pin.startswith(f"triton=={collect_env._TESTED_TRITON}.")


def test_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "_find_driver", lambda: "450.1")
    row = find(collect_env._check_torch(make_torch("13.0", is_available=False)), "cuda driver")
    assert row.status == "wrong"
    assert "update the driver" in row.mend


def test_gpu_that_torch_was_not_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = make_torch("13.0", is_available=True)
    torch.cuda.get_arch_list = lambda: ["sm_90"]
    assert find(collect_env._check_gpus(torch), "gpu 0").status == "wrong"


def test_optional_package_of_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError("flash_attn.so: undefined symbol: _ZN3c10")

    monkeypatch.setattr(collect_env, "import_module", fail)
    row = collect_env._check_optional("flash_attn", "slower")
    assert (row.name, row.status) == ("flash-attn", "wrong")
    assert "undefined symbol" in row.found
    assert "built for another torch" in row.mend


def test_compiled_ops_that_do_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise OSError("undefined symbol: cusparse")

    monkeypatch.setattr(collect_env, "import_module", fail)
    (row,) = collect_env._check_ops()
    assert row.status == "wrong"
    assert "cusparse" in row.found
    assert "make build" in row.mend


def test_library_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        collect_env.metadata,
        "requires",
        lambda name: ["msgspec>=99", "nothing-here>=1", "torch>=99"],
    )
    rows = list(collect_env._check_libraries())
    assert [(row.name, row.status) for row in rows] == [
        ("msgspec", "wrong"),
        ("nothing-here", "wrong"),
    ]
    assert rows[0].mend == "pip install 'msgspec>=99'"
