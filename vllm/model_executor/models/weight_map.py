"""From names of checkpoints to places in a model, and the loading that follows from it.

A family is a tuple of `WeightRow`s; `load_weights` expands them over layers and experts, checks
every shape, and accounts for every name: used, ignored for a reason, or unknown. Never reads files.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from vllm.errors import WeightError
from vllm.model_executor.layers.weight_place import (
    HoldsExperts,
    HoldsWeights,
    Shard,
    WeightPlace,
)

_MAX_NAMED = 8
_FUSED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRow:
    """One kind of tensor of a checkpoint.

    Attributes:
        source: its name without the field (".weight", ".bias"); {i} is the layer, {e} the expert.
        target: path of the module that holds it; {i} is the layer.
        shard: which part of the module's parameter; for experts the expert's number is added.
    """

    source: str
    target: str
    shard: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of a checkpoint's tensors; a tensor that is missing is a WeightError instead.

    Attributes:
        used: names that went into the model.
        ignored: names that a model of this family does not need -> why.
        unused: names that this family does not know; worth a warning.
    """

    used: tuple[str, ...]
    ignored: Mapping[str, str]
    unused: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    module: HoldsWeights
    field: str
    shard: Shard

    def place(self) -> WeightPlace:
        return self.module.place(self.field, self.shard)


def expand_rows(rows: Iterable[WeightRow], model: nn.Module) -> dict[str, _Target]:
    """Return checkpoint name -> place, for every tensor that `model` needs.

    Rows whose module the model does not have (a norm that is switched off, an MLP where experts
    could be) give nothing.
    """
    modules = dict(model.named_modules())
    num_layers = sum(1 for _ in model.get_submodule("layers").children())
    targets: dict[str, _Target] = {}
    for row in rows:
        layers = range(num_layers) if "{i}" in row.source else (0,)
        for layer in layers:
            module = modules.get(row.target.replace("{i}", str(layer)))
            if module is None:
                continue
            source = row.source.replace("{i}", str(layer))
            targets |= _expand_row(source, cast(HoldsExperts, module), row.shard)
    return targets


def _expand_row(source: str, module: HoldsExperts, shard: str | None) -> dict[str, _Target]:
    if "{e}" not in source:
        return {
            f"{source}.{field}": _Target(module=module, field=field, shard=shard)
            for field in module.fields
        }
    assert shard is not None
    return {
        f"{source.replace('{e}', str(expert))}.{field}": _Target(
            module=module, field=field, shard=(shard, expert)
        )
        for expert in range(module.num_experts)
        for field in module.fields
    }


def load_weights(
    targets: Mapping[str, _Target],
    weights: Iterable[tuple[str, Tensor]],
    ignored: Iterable[tuple[str, str]],
    renames: Iterable[tuple[str, str]],
) -> LoadReport:
    """Write every tensor of a checkpoint to its place.

    Args:
        targets: what `expand_rows` returned.
        weights: names and tensors, each once, in any order.
        ignored: (pattern of whole names, why) of tensors that are not needed.
        renames: (pattern of whole names that other writers use, the name that `targets` has).

    Raises:
        WeightError: a tensor is missing, comes twice, or has the wrong shape or dtype.
    """
    aliases = [(re.compile(pattern), name) for pattern, name in renames]
    reasons = [(re.compile(pattern), why) for pattern, why in ignored]
    filled: set[str] = set()
    used: dict[str, None] = {}
    skipped: dict[str, str] = {}
    unused: list[str] = []
    named = ((source, _rename(source, aliases), tensor) for source, tensor in weights)
    for source, given_name, tensor in _split_fused(named, targets):
        name = _rename(given_name, aliases)
        if name in targets:
            if name in filled:
                raise WeightError(f"tensor {source!r} comes twice in the checkpoint")
            _write(source, tensor, targets[name])
            filled.add(name)
            used[source] = None
            continue
        why = next((why for pattern, why in reasons if pattern.fullmatch(name)), None)
        if why is None:
            unused.append(source)
        else:
            skipped[source] = why
    _check_complete(targets, filled, skipped, unused)
    return LoadReport(used=tuple(used), ignored=skipped, unused=tuple(unused))


def _rename(name: str, aliases: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, replacement in aliases:
        match = pattern.fullmatch(name)
        if match:
            return match.expand(replacement)
    return name


def _write(name: str, tensor: Tensor, target: _Target) -> None:
    place = target.place()
    if tuple(tensor.shape) != place.shape:
        raise WeightError(
            f"tensor {name!r} has shape {list(tensor.shape)}, but the model's config asks for "
            f"{list(place.shape)}; the file and the config do not belong together"
        )
    if not tensor.is_floating_point():
        raise WeightError(
            f"tensor {name!r} has dtype {str(tensor.dtype).removeprefix('torch.')}, but weights "
            "must be floating point; quantised checkpoints are read from GGUF files only"
        )
    place.write(tensor)


def _check_complete(
    targets: Mapping[str, _Target],
    filled: Set[str],
    skipped: Mapping[str, str],
    unused: list[str],
) -> None:
    missing = [name for name in targets if name not in filled]
    if not missing:
        return
    shown = ", ".join(
        f"{name!r} of shape {list(targets[name].place().shape)}" for name in missing[:_MAX_NAMED]
    )
    more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
    hints = [f"{name!r} was ignored: {why}" for name, why in skipped.items()][:2]
    hints += [f"{name!r} is there but not known to this model" for name in unused[:2]]
    raise WeightError(
        f"the checkpoint lacks {len(missing)} of {len(targets)} tensors: {shown}{more}. "
        + ("Found instead: " + "; ".join(hints) + ". " if hints else "")
        + "Check that the download is complete and that config.json belongs to it"
    )


def _split_fused(
    weights: Iterable[tuple[str, str, Tensor]], whole: Container[str]
) -> Iterable[tuple[str, str, Tensor]]:
    """Cut tensors that hold all experts of a layer ([N, rows, columns]) into one for each expert.

    Args:
        weights: names in the file, names that the model's rows have, tensors.
        whole: names that the model takes in one piece.

    Yields:
        The name in the file, the name of the part, the part.
    """
    for source, name, tensor in weights:
        match = _FUSED_EXPERTS.fullmatch(name)
        if match is None or tensor.dim() != 3 or name in whole:
            yield source, name, tensor
            continue
        prefix, kind = match.groups()
        for expert, matrix in enumerate(tensor):
            if kind == "down_proj":
                yield source, f"{prefix}.{expert}.down_proj.weight", matrix
            else:
                gate, up = matrix.chunk(2)
                yield source, f"{prefix}.{expert}.gate_proj.weight", gate
                yield source, f"{prefix}.{expert}.up_proj.weight", up
