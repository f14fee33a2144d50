"""A model's config and generation config as plain dicts.

Called by config/resolve.py. Reads config.json of a directory (own or fetched from the hub) or the
metadata of a GGUF file, lifts nested text configs to the top, fills in the family's defaults and
brings rotary and dtype spellings to one form (see rope_config.py and dtype.py). Known families need
no transformers import; the rest go through its AutoConfig. Never imports torch by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.transformers_utils.config_families import (
    FAMILIES,
    apply_family,
    family_of,
    fill_heads,
)
from vllm.transformers_utils.dtype import normalize_dtype
from vllm.transformers_utils.gguf_config import gguf_to_config, stop_token_ids
from vllm.transformers_utils.gguf_file import read_gguf
from vllm.transformers_utils.hub import find_config_file, resolve_path
from vllm.transformers_utils.rope_config import normalize_rope
from vllm.transformers_utils.torch_guard import hide_torch

logger = init_logger(__name__)

# Models of several modalities of which the text part can be served: class -> class of that part.
_TEXT_PART = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
_OTHER_PARTS = ("text_config", "vision_config", "audio_config")
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


def get_config(
    model: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    download_dir: str | None = None,
    without_torch: bool = False,
) -> dict[str, Any]:
    """Return the complete config of a model.

    Args:
        model: directory, GGUF file or hub id.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: whether Python code in the checkpoint may run to read its config.
        download_dir: where files of a hub id are kept; None is the library's own place.
        without_torch: whether transformers, if needed at all, is imported with torch hidden.

    Returns:
        A new dict. Always there for known families: every size, `head_dim`, `num_key_value_heads`,
        `architectures`, `rope_parameters` (rope_config.py), `dtype` (a name, or None) and, where
        layers differ, `layer_types`. A multimodal config is replaced by its text part, with
        `lifted_from` naming the whole.

    Raises:
        ConfigError: not found, not readable, or values that cannot be served.
    """
    path = resolve_path(model, revision=revision, download_dir=download_dir)
    if path.is_file():
        config = gguf_to_config(read_gguf(path))
        config["architectures"] = [FAMILIES[config["model_type"]].architecture]
    else:
        config = _lift_text_config(_read_json(path, "config.json", required=True))
        _refuse_quantized(config, path)
    normalize_dtype(config)
    family = family_of(config)
    if family is not None:
        apply_family(config, family)
        return config
    with hide_torch(without_torch):
        config = _through_transformers(config, path, trust_remote_code)
    if any(key in config for key in _ROPE_KEYS):
        normalize_rope(config)
    normalize_dtype(config)
    return config


def find_architectures(
    model: str, *, revision: str | None = None, download_dir: str | None = None
) -> list[str]:
    """Return the class names that a model asks for, without completing its config.

    Raises: ConfigError: not found, not readable, or a GGUF file of a family that is not served.
    """
    path = resolve_path(model, revision=revision, download_dir=download_dir)
    if path.is_file():
        return [FAMILIES[gguf_to_config(read_gguf(path))["model_type"]].architecture]
    config = _read_json(path, "config.json", required=True)
    is_nested = isinstance(config.get("text_config"), Mapping)
    names = [_TEXT_PART.get(n, n) if is_nested else n for n in config.get("architectures") or ()]
    family = None if names else family_of(config)
    return names if family is None else [family.architecture]


def get_generation_config(
    model: str, *, revision: str | None = None, download_dir: str | None = None
) -> dict[str, Any]:
    """Return generation_config.json as a dict, empty if there is none.

    For a GGUF file: `eos_token_id` lists the ids that end a text or a turn.
    """
    path = resolve_path(model, revision=revision, download_dir=download_dir)
    if path.is_file():
        ids = stop_token_ids(read_gguf(path))
        return {"eos_token_id": ids} if ids else {}
    return _read_json(path, "generation_config.json", required=False)


def _read_json(directory: Path, name: str, *, required: bool) -> dict[str, Any]:
    path = find_config_file(directory, name)
    if path is None:
        if not required:
            return {}
        raise ConfigError(f"{directory} has no {name}.{_gguf_hint(directory)}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; expected a JSON object.")
    return value


def _refuse_quantized(config: Mapping[str, Any], path: Path) -> None:
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", "an unnamed method")
        raise ConfigError(
            f"{path} is quantised with {method}, which is not served. Use the "
            "unquantised checkpoint, or a GGUF file of it."
        )


def _gguf_hint(directory: Path) -> str:
    files = sorted(directory.glob("*.gguf"))
    return f" It holds GGUF files; give the file itself: {files[0]}" if files else ""


def _lift_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Bring a nested text config to the top; where it is silent, keys of the whole stay."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    lifted = {k: v for k, v in config.items() if k not in _OTHER_PARTS}
    lifted |= {k: v for k, v in text.items() if v is not None or k not in lifted}
    lifted["architectures"] = [
        _TEXT_PART.get(name, name) for name in config.get("architectures") or ()
    ]
    lifted["model_type"] = text.get("model_type") or config.get("model_type")
    lifted["lifted_from"] = config.get("model_type")
    if lifted["model_type"] == "gemma3":  # saved without a type of its own
        lifted["model_type"] = "gemma3_text"
    logger.info("%s: the text part of the model is served.", config.get("model_type"))
    return lifted


def _through_transformers(
    raw: dict[str, Any], path: Path, trust_remote_code: bool
) -> dict[str, Any]:
    """Let transformers complete the config of a family that has no row here."""
    has_code = "AutoConfig" in (raw.get("auto_map") or {})
    from transformers import CONFIG_MAPPING, AutoConfig  # noqa: PLC0415 - slow, seldom needed

    known = raw.get("model_type") in CONFIG_MAPPING
    if not known and not has_code:
        return raw  # a model class registered by the user may know what to do with it
    if not known and not trust_remote_code:
        raise ConfigError(
            f"{path} brings Python code of its own to read its config (model_type "
            f"{raw.get('model_type')!r}). Read that code, then add --trust-remote-code."
        )
    try:
        loaded = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever the checkpoint's own code may raise
        raise ConfigError(
            f"transformers cannot read {path}/config.json: {type(error).__name__}: {error}"
        ) from error
    text = loaded.get_text_config()
    completed = {**raw, **text.to_dict(), "architectures": raw.get("architectures")}
    if "num_hidden_layers" not in completed and hasattr(text, "num_hidden_layers"):
        completed["num_hidden_layers"] = text.num_hidden_layers  # computed from a pattern of layers
    if completed.get("num_attention_heads") and completed.get("hidden_size"):
        fill_heads(completed)
    return completed
