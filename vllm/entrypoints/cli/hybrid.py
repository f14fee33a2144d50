"""`vllm hybrid`: what the layers of a model keep, what fits, and how to write it down.

`inspect` shows every layer, `plan` the capacity of hybrid beside vanilla, `convert` writes the
files of hybrid mode. No weights are read.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm.cache_spec import LayerCacheSpec, State
from vllm.config import EngineConfig
from vllm.config.hybrid import LAYERS_KEY, HybridConfig, HybridSettings, check_types
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.hybrid.layer_kinds import kind_name, read_layer_kinds
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.hub import resolve_path
from vllm.utils.argument_parser import FlexibleArgumentParser

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MIB, _GIB = 2**20, 2**30
_CONFIG_FILE, _HYBRID_FILE = "config.json", "hybrid_config.json"


def main(argv: Sequence[str]) -> int:
    """Run `vllm hybrid inspect | plan | convert`; returns the exit status."""
    parser = FlexibleArgumentParser(prog="vllm hybrid", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(
        prog="vllm hybrid", dest="command", required=True, metavar="COMMAND"
    )
    _add_inspect(commands)
    _add_plan(commands)
    _add_convert(commands)
    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as "18.58GiB", "512M" or "1e9" names.

    Raises:
        argparse.ArgumentTypeError: no number, or another unit.
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    try:
        value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of bytes; write it as 20000000000, 18.58GiB or 512MiB"
        )
    return int(value)


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="directory, GGUF file or hub id")
    parser.add_argument("--max-model-len", type=int, default=None, help="tokens of a sequence")
    parser.add_argument("--hybrid-config", default=None, metavar="FILE", help="as of vllm serve")
    parser.add_argument("--dtype", default="auto", help="element type of the model")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, help="ranks")
    parser.add_argument("--trust-remote-code", action="store_true", help="as of vllm serve")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _make_config(args: argparse.Namespace, **fields: Any) -> EngineConfig:
    return EngineArgs(
        model=args.model,
        skip_tokenizer_init=True,
        trust_remote_code=args.trust_remote_code,
        max_model_len=args.max_model_len,
        dtype=args.dtype,
        block_size=args.block_size,
        tensor_parallel_size=args.tensor_parallel_size,
        hybrid_mode=True,
        hybrid_config=args.hybrid_config,
        **fields,
    ).create_engine_config()


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="layers, what they keep, bytes of a token")
    _add_engine_flags(parser)
    parser.set_defaults(run=_inspect)


def _inspect(args: argparse.Namespace) -> int:
    from vllm.worker.hybrid_plan import read_specs  # noqa: PLC0415  needs torch, --help does not

    config = _make_config(args)
    found = describe_layers(config, read_specs(config, config.hybrid))
    print(json.dumps(found, indent=2) if args.json else "\n".join(format_layers(found)))
    return 0


def describe_layers(config: EngineConfig, specs: Sequence[LayerCacheSpec]) -> dict[str, Any]:
    """Return the layers of a model and their bytes on one rank, for JSON."""
    policies = config.hybrid.policies or ()
    cached = {spec.layer: spec for spec in specs}
    layers: list[dict[str, Any]] = []
    for policy in policies:
        spec = cached.get(policy.layer)
        layers.append(
            {
                "layer": policy.layer,
                "type": policy.kind,
                "keeps": kind_name(policy.lifetime),
                "reads_from": policy.reads_from,
                "kernel": policy.kernel,
                "block_tokens": policy.block_tokens,
                "bytes_per_token": spec.token_bytes if spec else 0,
                "bytes_per_sequence": spec.sequence_bytes if spec else 0,
                "is_reduced": policy.is_reduced,
            }
        )
    return {
        "model": config.model_config.model,
        "architectures": list(config.model_config.architectures),
        "dtype": config.model_config.dtype.value,
        "max_model_len": config.model_config.max_model_len,
        "num_layers": len(layers),
        "bytes_per_token": sum(entry["bytes_per_token"] for entry in layers),
        "bytes_per_sequence": sum(entry["bytes_per_sequence"] for entry in layers),
        "layers": layers,
    }


def format_layers(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of `vllm hybrid inspect`: one line for each run of layers that are alike."""
    yield f"{found['model']}: {found['num_layers']} layers, {', '.join(found['architectures'])}"
    yield ""
    yield (
        f"{'layers':<12}{'type':<18}{'keeps':<22}{'kernel':<12}{'bytes/token':>12}"
        f"{'bytes/sequence':>16}"
    )
    columns = ("type", "keeps", "kernel", "bytes_per_token", "bytes_per_sequence", "reads_from")
    for key, run in groupby(found["layers"], key=lambda entry: [entry[c] for c in columns]):
        members = [entry["layer"] for entry in run]
        name = str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"
        kind, keeps, kernel, token_bytes, sequence_bytes, reads_from = key
        if reads_from is not None:
            keeps = f"{keeps}, reads {reads_from}"
        yield f"{name:<12}{kind:<18}{keeps:<22}{kernel:<12}{token_bytes:>12}{sequence_bytes:>16}"
    yield ""
    yield (
        f"a token: {found['bytes_per_token']} bytes while every layer sees it; states: "
        f"{found['bytes_per_sequence']} bytes a sequence"
    )


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser("plan", help="what fits, vanilla beside hybrid")
    _add_engine_flags(parser)
    parser.add_argument(
        "--kv-bytes", type=parse_bytes, required=True, help="cache of a rank, e.g. 18.58GiB"
    )
    parser.add_argument("--max-num-batched-tokens", type=int, default=None, help="tokens of a step")
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    from vllm.worker.hybrid_plan import VANILLA  # noqa: PLC0415  needs torch, --help does not

    config = _make_config(args, max_num_batched_tokens=args.max_num_batched_tokens)
    result = {
        "model": args.model,
        "max_model_len": config.model_config.max_model_len,
        "kv_bytes": args.kv_bytes,
        "vanilla": describe_plan(config, VANILLA, args.kv_bytes),
        "hybrid": describe_plan(config, config.hybrid, args.kv_bytes),
    }
    print(json.dumps(result, indent=2) if args.json else "\n".join(format_plans(result)))
    return 0


def describe_plan(config: EngineConfig, settings: HybridSettings, kv_bytes: int) -> dict[str, Any]:
    """Return what fits one way, for JSON."""
    from vllm.worker.hybrid_plan import plan_cache  # noqa: PLC0415  needs torch, --help does not

    plan = plan_cache(config, settings, kv_bytes)
    capacity = plan.capacity
    return {
        "max_concurrency": round(capacity.max_concurrency, 2),
        "bytes_per_sequence": capacity.bytes_per_sequence,
        "tokens_at_max_len": capacity.tokens_at_max_len,
        "arena_bytes": capacity.arena_bytes,
        "superblock_bytes": capacity.superblock_bytes,
        "num_superblocks": capacity.num_superblocks,
        "groups": [
            {
                "name": group.name,
                "keeps": kind_name(group.lifetime),
                "layers": list(group.layers),
                "block_tokens": 0 if isinstance(group.lifetime, State) else group.block_tokens,
                "block_bytes": group.block_bytes,
                "blocks_per_sequence": sized.blocks_per_sequence,
                "num_blocks": capacity.num_superblocks * sized.blocks_per_superblock,
                "waste": round(sized.waste, 6),
            }
            for group, sized in zip(plan.groups, capacity.groups, strict=True)
        ],
    }


def format_plans(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of `vllm hybrid plan`."""
    yield (
        f"{result['model']}: {result['kv_bytes'] / _GIB:.2f} GiB of cache, sequences of "
        f"{result['max_model_len']} tokens"
    )
    yield ""
    yield f"{'':<28}{'vanilla':>16}{'hybrid':>16}"
    ways = (result["vanilla"], result["hybrid"])
    rows: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
        ("sequences at once", lambda way: f"{way['max_concurrency']:.2f}"),
        ("MiB of a sequence", lambda way: f"{way['bytes_per_sequence'] / _MIB:.2f}"),
        ("tokens in all", lambda way: str(way["tokens_at_max_len"])),
        ("superblocks", lambda way: str(way["num_superblocks"])),
    )
    for title, show in rows:
        yield f"{title:<28}" + "".join(f"{show(way):>16}" for way in ways)
    for name, way in zip(("vanilla", "hybrid"), ways, strict=True):
        for group in way["groups"]:
            yield ""
            held = f"{group['block_tokens']} tokens" if group["block_tokens"] else "a sequence"
            yield f"{name} group {group['name']!r}: keeps {group['keeps']}, {group['layers']}"
            yield (
                f"  a block holds {held}, {group['block_bytes']} bytes; at most "
                f"{group['blocks_per_sequence']} a sequence; waste {group['waste']:.2%}"
            )


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser("convert", help="write config.json and hybrid_config.json")
    parser.add_argument("model", metavar="MODEL", help="directory, GGUF file or hub id")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="where to write")
    for name, meta, text in (
        ("layers", "TYPE=0-15,20", "layers of a type; every layer needs one (types of the model)"),
        ("ratio", "TYPE=0.35", "share of max_model_len that a sequence keeps"),
        ("sinks", "TYPE=4", "first tokens kept beside that"),
        ("block", "TYPE=8", "tokens of a block"),
        ("kernel", "TYPE=cpu", "attention kernel"),
    ):
        parser.add_argument(f"--{name}", action="append", default=[], metavar=meta, help=text)
    parser.set_defaults(run=_convert)


def _convert(args: argparse.Namespace) -> int:
    config = get_config(args.model, without_torch=True)
    kinds = read_layer_kinds(config)
    layers: dict[str, list[int]] = {}
    if args.layers:
        layers = {name: parse_layers(text) for name, text in _split(args.layers, "--layers")}
    else:
        for kind in kinds:
            layers.setdefault(kind.kind, []).append(kind.layer)
    hybrid = HybridConfig(
        layers={name: tuple(ids) for name, ids in layers.items()},
        block_size_map=_read_map(args.block, "--block", int),
        layer_impl_map=_read_map(args.kernel, "--kernel", str),
        kv_cache_ratio=_read_map(args.ratio, "--ratio", float),
        kv_sink_tokens=_read_map(args.sinks, "--sinks", int),
    )
    if not hybrid.block_size_map:
        sizes = {name: 0 if min(ids) >= len(kinds) else 16 for name, ids in layers.items()}
        hybrid = replace(hybrid, block_size_map=sizes)
    check_types(hybrid, sorted(layers), len(kinds))
    for line in write_converted(resolve_path(args.model), Path(args.output), layers, hybrid):
        print(line, file=sys.stderr)
    return 0


def write_converted(
    source: Path, target: Path, layers: Mapping[str, Sequence[int]], hybrid: HybridConfig
) -> Iterator[str]:
    """Write the files of hybrid mode into `target`, and link the checkpoint's others there.

    A GGUF file has no config.json: hybrid_config.json then names the layers as well.

    Yields:
        A line for each file written.

    Raises:
        ConfigError: `target` is the checkpoint itself.
    """
    if target.resolve() == source.resolve():
        raise ConfigError(f"-o {target} is the checkpoint itself; name another directory")
    target.mkdir(parents=True, exist_ok=True)
    hybrid.save(target / _HYBRID_FILE)
    if source.is_file():
        written = json.loads((target / _HYBRID_FILE).read_text(encoding="utf-8"))
        _write_json(target / _HYBRID_FILE, {LAYERS_KEY: layers, **written})
    else:
        config = json.loads((source / _CONFIG_FILE).read_text(encoding="utf-8"))
        _write_json(target / _CONFIG_FILE, {**config, LAYERS_KEY: layers})
        yield f"{target / _CONFIG_FILE}: {LAYERS_KEY} written"
        for path in source.iterdir():
            link = target / path.name
            if path.name not in (_CONFIG_FILE, _HYBRID_FILE) and not link.exists():
                link.symlink_to(path.resolve())
    yield f"{target / _HYBRID_FILE}: for --hybrid-config"


def parse_layers(text: str) -> list[int]:
    """Return the ids that "0-15,20" names; ConfigError for anything else."""
    ids: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"{part!r} is no layer and no range of layers; write 3 or 0-15")
        ids.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ids


def _split(entries: Sequence[str], flag: str) -> Iterator[tuple[str, str]]:
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{flag} {entry!r}: expected TYPE=VALUE")
        yield name, value


def _read_map(entries: Sequence[str], flag: str, read: Callable[[str], Any]) -> dict[str, Any]:
    found = {}
    for name, text in _split(entries, flag):
        try:
            found[name] = read(text)
        except ValueError:
            raise ConfigError(f"{flag} {name}={text}: {text!r} is no {read.__name__}") from None
    return found


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
