"""From what the user calls the model to files on this machine.

Called by the config, tokenizer and weight readers. A directory and a GGUF file stand for
themselves; anything else is a Hugging Face hub id, fetched (or found in the local cache) by
huggingface_hub. Never reads the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm.errors import ConfigError
from vllm.transformers_utils.gguf_file import is_gguf_file

CONFIG_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")


def resolve_path(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    allow_patterns: Sequence[str] = CONFIG_PATTERNS,
    ignore_patterns: Sequence[str] = (),
) -> Path:
    """Return the directory or GGUF file that holds `model`.

    Raises:
        ConfigError: neither a directory, nor a GGUF file, nor a hub id that can be fetched.
    """
    path = Path(model).expanduser()
    if path.is_dir() or is_gguf_file(path):
        return path
    if path.exists():
        raise ConfigError(
            f"{model} is a file, but not a GGUF file. Give a directory with config.json and "
            "safetensors, a .gguf file, or a hub id."
        )
    if not _looks_like_hub_id(model):
        raise ConfigError(
            f"{model} does not exist. Give a directory with config.json and safetensors, "
            "a .gguf file, or a hub id such as 'owner/name'."
        )
    return _fetch(model, revision, download_dir, allow_patterns, ignore_patterns)


def find_config_file(directory: Path, name: str) -> Path | None:
    """Return `directory/name` if it is there."""
    path = directory / name
    return path if path.is_file() else None


def _looks_like_hub_id(model: str) -> bool:
    parts = model.split("/")
    return len(parts) in (1, 2) and all(parts) and not model.startswith((".", "~"))


def _fetch(
    model: str,
    revision: str | None,
    download_dir: str | None,
    allow_patterns: Sequence[str],
    ignore_patterns: Sequence[str],
) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow, and seldom needed

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(allow_patterns),
                ignore_patterns=[*ignore_patterns, "original/**/*"],
            )
        )
    except Exception as error:  # the library raises many kinds: network, HTTP, cache, bad ids
        raise ConfigError(
            f"{model} is neither a directory nor a GGUF file here, and it cannot be fetched as a "
            f"hub id: {type(error).__name__}: {error}"
        ) from error
