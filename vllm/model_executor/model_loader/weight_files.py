"""Which files of a model hold its weights.

Called by `weights.py`. Prefers safetensors to .bin to .pt, follows index files, leaves out what is
not a weight, and says which shard is missing. Never opens a weight file.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm.errors import ConfigError, WeightError
from vllm.transformers_utils.hub import resolve_path

_SHARD = re.compile(r"^(?P<stem>.+)-(?P<part>\d+)-of-(?P<count>\d+)(?P<suffix>\.[a-z]+)$")
# Files that trainers leave beside the weights.
_NOT_WEIGHTS = (
    "training_args.*",
    "optimizer.*",
    "scheduler.*",
    "rng_state*",
    "scaler.*",
    "adapter_*",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The files of one model.

    Attributes:
        kind: "safetensors" or "pt" (pickled, .bin and .pt alike).
        paths: the files, in order.
        index: tensor name -> file name, empty without an index file. It decides which file a name
            is read from.
    """

    kind: str
    paths: tuple[Path, ...]
    index: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """One way of storing weights: files, index, and the usual name of a single file."""

    kind: str
    pattern: str
    index_name: str | None
    single_name: str | None


_FORMATS = {
    "safetensors": (
        _Format(
            kind="safetensors",
            pattern="*.safetensors",
            index_name="model.safetensors.index.json",
            single_name="model.safetensors",
        ),
    ),
    "pt": (
        _Format(
            kind="pt",
            pattern="*.bin",
            index_name="pytorch_model.bin.index.json",
            single_name="pytorch_model.bin",
        ),
        _Format(kind="pt", pattern="*.pt", index_name=None, single_name=None),
    ),
}
_FORMATS["auto"] = _FORMATS["safetensors"] + _FORMATS["pt"]


def find_weight_files(
    model: str,
    load_format: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    ignore_patterns: Sequence[str] = (),
) -> WeightFiles:
    """Find the weights of a directory, or fetch those of a hub id.

    Args:
        model: directory or hub id.
        load_format: "auto", "safetensors" or "pt".
        revision: branch, tag or commit of a hub id.
        download_dir: where files of a hub id are kept.
        ignore_patterns: file names to leave out.

    Raises:
        ConfigError: an unknown load format, or no such model.
        WeightError: no weights, or a shard is missing.
    """
    formats = _FORMATS.get(load_format)
    if formats is None:
        raise ConfigError(
            f"load_format {load_format!r}: allowed are {', '.join(_FORMATS)}, gguf, dummy."
        )
    directory = Path(model)
    for candidate in formats:
        directory = resolve_path(
            model,
            revision=revision,
            download_dir=download_dir,
            allow_patterns=[candidate.pattern, f"{candidate.pattern}.index.json"],
            ignore_patterns=ignore_patterns,
        )
        found = _find(directory, candidate, (*ignore_patterns, *_NOT_WEIGHTS))
        if found is not None:
            return found
    patterns = ", ".join(f.pattern for f in formats)
    raise WeightError(
        f"{directory} holds no weights: looked for {patterns} (load_format {load_format}). "
        "--load-format dummy runs a model without weights."
    )


def _find(directory: Path, wanted: _Format, ignore_patterns: Sequence[str]) -> WeightFiles | None:
    index_path = directory / wanted.index_name if wanted.index_name else None
    if index_path is not None and index_path.is_file():
        return _from_index(index_path, wanted.kind)
    paths = [
        path
        for path in sorted(directory.glob(wanted.pattern))
        if not any(fnmatch.fnmatch(path.name, pattern) for pattern in ignore_patterns)
    ]
    single = directory / wanted.single_name if wanted.single_name else None
    if single in paths:  # beside it, the same weights may lie in another layout
        paths = [single]
    if not paths:
        return None
    _check_shards(paths)
    return WeightFiles(kind=wanted.kind, paths=tuple(paths), index={})


def _from_index(index_path: Path, kind: str) -> WeightFiles:
    try:
        index = dict(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{index_path} is not an index of weights: {error!r}") from None
    paths = [index_path.with_name(name) for name in sorted(set(index.values()))]
    _check_present(paths, f"{index_path} names them")
    return WeightFiles(kind=kind, paths=tuple(paths), index=index)


def _check_shards(paths: Iterable[Path]) -> None:
    """Without an index, file names like model-00001-of-00003 tell what should be there."""
    for path in paths:
        match = _SHARD.match(path.name)
        if match:
            width, count = len(match["part"]), int(match["count"])
            names = [
                f"{match['stem']}-{part:0{width}d}-of-{match['count']}{match['suffix']}"
                for part in range(1, count + 1)
            ]
            _check_present([path.with_name(name) for name in names], f"{path.name} is there")


def _check_present(paths: Iterable[Path], why: str) -> None:
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise WeightError(
            f"{len(missing)} file(s) with weights are missing ({why}): {', '.join(missing)}. "
            "Fetch the model again."
        )
