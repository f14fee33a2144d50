"""From model names to places: local paths stay, hub ids are fetched, the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.utils.fixtures_gguf import write_fx_gguf
from vllm.errors import ConfigError
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.hub import resolve_path


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Stands in for the hub: records what is asked for and serves `tmp_path`."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_local_paths_are_not_fetched(fetched: list[dict[str, Any]], tmp_path: Path) -> None:
    file = write_fx_gguf(tmp_path / "fx.gguf")
    assert resolve_path(str(tmp_path)) == tmp_path
    assert resolve_path(str(file)) == file
    assert not fetched


def test_a_hub_id_is_fetched_without_its_weights(
    fetched: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = get_config("owner/name", revision="v1", download_dir="/cache")
    assert config["hidden_size"] == 4096
    (call,) = fetched
    assert (call["repo_id"], call["revision"], call["cache_dir"]) == ("owner/name", "v1", "/cache")
    assert "*.json" in call["allow_patterns"]
    assert not any("safetensors" in pattern for pattern in call["allow_patterns"])


def test_weights_are_looked_for_format_by_format(
    fetched: list[dict[str, Any]], tmp_path: Path
) -> None:
    import torch

    from vllm.model_executor.model_loader.weight_files import find_weight_files

    torch.save({}, tmp_path / "pytorch_model.bin")
    files = find_weight_files("owner/name", "auto", ignore_patterns=("x*",))
    assert files.kind == "pt" and [p.name for p in files.paths] == ["pytorch_model.bin"]
    assert [call["allow_patterns"][0] for call in fetched] == ["*.safetensors", "*.bin"]
    assert all("x*" in call["ignore_patterns"] for call in fetched)


def test_what_the_hub_says_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match=r"owner/name.*OSError: no route to host"):
        resolve_path("owner/name")
