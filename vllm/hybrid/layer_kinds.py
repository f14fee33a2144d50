"""What each layer of a checkpoint must remember, read from its config.

Called once, by engine/arg_utils.py; plain data in, plain data out. One small function a family,
chosen by the table at the end. Families whose layers need a memory that the engine does not have
are refused by name and field, never served as if they were uniform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.cache_spec import Chunk, Full, Lifetime, Nothing, State, Window
from vllm.config.hybrid import LAYERS_KEY, parse_hybrid_layers
from vllm.errors import ConfigError

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What one decoder layer remembers.

    Attributes:
        layer: its index, from 0.
        kind: name of the layer type, the lifetime's own unless the user named it.
        lifetime: how long a row stays visible; for a layer with two memories (attention beside a
            recurrent state) that of the attention.
        reads_from: layer whose cache this one reads.
    """

    layer: int
    kind: str
    lifetime: Lifetime
    reads_from: int | None = None


FULL, STATE, NOTHING = Full(), State(), Nothing()


def read_layer_kinds(config: Config) -> tuple[LayerKind, ...]:
    """Return the kind of every decoder layer that the checkpoint declares.

    Args:
        config: complete config as `transformers_utils.config.get_config` returns it.

    Raises:
        ConfigError: a field holds a value that no layer of the engine can serve, or the number of
            entries is not the number of layers.
    """
    model_type = str(config.get("model_type"))
    if model_type in _REFUSED:
        field, reason = _REFUSED[model_type]
        raise ConfigError(
            f"model_type {model_type!r} cannot be served: its `{field}` asks for {reason}, which "
            f"this engine does not have. Served hybrid families: {', '.join(sorted(_FAMILIES))}."
        )
    lifetimes = _FAMILIES.get(model_type, _by_layer_types)(config)
    num_layers = int(config["num_hidden_layers"])
    if len(lifetimes) != num_layers:
        raise ConfigError(
            f"the config of {model_type!r} describes {len(lifetimes)} layers, but "
            f"num_hidden_layers is {num_layers}. Mend config.json."
        )
    owners = _read_owners(config, lifetimes)
    names = [kind_name(lifetime) for lifetime in lifetimes]
    if owners:  # which are read once more when all tokens of a step are written
        lifetimes = [
            replace(life, tokens=life.tokens + 1) if isinstance(life, Window) else life
            for life in lifetimes
        ]
    return tuple(
        LayerKind(layer=i, kind=name, lifetime=life, reads_from=owners.get(i))
        for i, (name, life) in enumerate(zip(names, lifetimes, strict=True))
    )


def kind_name(lifetime: Lifetime) -> str:
    """Return the name of a layer type that the user did not name."""
    match lifetime:
        case Window(tokens=tokens, sinks=0):
            return f"window_{tokens}"
        case Window(tokens=tokens, sinks=sinks):
            return f"window_{tokens}_sinks_{sinks}"
        case Chunk(tokens=tokens):
            return f"chunk_{tokens}"
    return type(lifetime).__name__.lower()


def read_layer_type(config: Config, layer: int) -> str:
    """Return the name that `hybrid_attention_layers` of a checkpoint gives a layer, else "full".

    Raises:
        ConfigError: the entry does not name each decoder layer exactly once.
    """
    named = config.get(LAYERS_KEY)
    if not named:
        return "full"
    types = parse_hybrid_layers(named, int(config["num_hidden_layers"]))
    return next(name for name, layers in types.items() if layer in layers)


def is_known_family(config: Config) -> bool:
    """Whether the table knows what the layers of this checkpoint's family keep, or refuses it."""
    model_type = config.get("model_type")
    return model_type in _FAMILIES or model_type in _REFUSED


def is_hybrid(kinds: Sequence[LayerKind]) -> bool:
    """Whether some layer remembers less than everything, or another's rows."""
    return any(k.lifetime != FULL or k.reads_from is not None for k in kinds)


def _window(config: Config, field: str = "sliding_window") -> Window:
    tokens = config.get(field)
    if not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(
            f"a layer is typed sliding_attention, but `{field}` is {tokens!r}. It must be the "
            "number of tokens that a query sees, itself counted."
        )
    return Window(tokens=tokens)


def _chunk(config: Config) -> Chunk:
    tokens = config.get("attention_chunk_size")
    if not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(
            f"a layer is typed chunked_attention, but `attention_chunk_size` is {tokens!r}. It "
            "must be a positive number of tokens."
        )
    return Chunk(tokens=tokens)


def _lifetime_of_type(name: str, config: Config) -> Lifetime:
    """Return the lifetime of one word of transformers' `layer_types`."""
    match name:
        case "full_attention" | "attention" | "full":
            return FULL
        case "sliding_attention" | "sliding":
            return _window(config)
        case "chunked_attention" | "chunked":
            return _chunk(config)
        case "linear_attention" | "linear" | "mamba" | "conv":
            return STATE
        case "moe" | "mlp":
            return NOTHING
    raise ConfigError(
        f"`layer_types` names {name!r}, a kind of layer that this engine does not have. Served: "
        "full_attention, sliding_attention, chunked_attention, linear_attention, mamba, conv, "
        "mlp, moe."
    )


def _by_layer_types(config: Config) -> list[Lifetime]:
    types = config.get("layer_types")
    if types is None:
        return _uniform(config)
    return [_lifetime_of_type(str(name), config) for name in types]


def _uniform(config: Config) -> list[Lifetime]:
    window = config.get("sliding_window")
    lifetime: Lifetime = Window(tokens=int(window)) if window else FULL
    return [lifetime] * int(config["num_hidden_layers"])


def _full(config: Config) -> list[Lifetime]:
    return [FULL] * int(config["num_hidden_layers"])


def _qwen3_next(config: Config) -> list[Lifetime]:
    if config.get("layer_types"):
        return _by_layer_types(config)
    interval = int(config.get("full_attention_interval") or 4)
    return [
        FULL if (i + 1) % interval == 0 else STATE for i in range(int(config["num_hidden_layers"]))
    ]


def _llama4(config: Config) -> list[Lifetime]:
    """NoPE layers see everything, layers with rotary positions see their chunk."""
    if config.get("layer_types"):
        return _by_layer_types(config)
    num_layers = int(config["num_hidden_layers"])
    rotary = config.get("no_rope_layers")  # 1 marks a layer WITH rotary positions
    if not rotary:
        interval = int(config.get("no_rope_layer_interval") or 4)
        rotary = [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not config.get("attention_chunk_size"):
        return [FULL] * num_layers
    return [_chunk(config) if flag else FULL for flag in rotary]


def _bamba(config: Config) -> list[Lifetime]:
    attention = set(config.get("attn_layer_indices") or ())
    return [FULL if i in attention else STATE for i in range(int(config["num_hidden_layers"]))]


def _granite_hybrid(config: Config) -> list[Lifetime]:
    types = config.get("layer_types") or config.get("layers_block_type")
    if types is None:
        raise ConfigError(
            "the config of 'granitemoehybrid' has neither `layer_types` nor `layers_block_type`."
        )
    return [_lifetime_of_type(str(name), config) for name in types]


def _nemotron_h(config: Config) -> list[Lifetime]:
    types = config.get("layer_types") or config.get("layers_block_type")
    if types is not None:
        return [_lifetime_of_type(str(name), config) for name in types]
    letters: dict[str, Lifetime] = {"M": STATE, "*": FULL, "-": NOTHING, "E": NOTHING}
    pattern = str(config.get("hybrid_override_pattern") or "")
    unknown = sorted(set(pattern) - set(letters))
    if unknown or not pattern:
        raise ConfigError(
            f"`hybrid_override_pattern` is {pattern!r}; each letter must be M (Mamba-2), * "
            "(attention), - (MLP) or E (experts)."
        )
    return [letters[letter] for letter in pattern]


def _lfm2(config: Config) -> list[Lifetime]:
    if config.get("layer_types"):
        return _by_layer_types(config)
    attention = set(config.get("full_attn_idxs") or ())
    return [FULL if i in attention else STATE for i in range(int(config["num_hidden_layers"]))]


def _read_owners(config: Config, lifetimes: Sequence[Lifetime]) -> dict[int, int]:
    """Map each of the last `num_kv_shared_layers` to the last earlier layer of its own type."""
    num_shared = int(config.get("num_kv_shared_layers") or 0)
    if not num_shared:
        return {}
    first = len(lifetimes) - num_shared
    owners = {}
    for layer in range(first, len(lifetimes)):
        same = [i for i in range(first) if lifetimes[i] == lifetimes[layer]]
        if not same:
            raise ConfigError(
                f"layer {layer} shares the cache of an earlier layer of its type "
                "(`num_kv_shared_layers`"
                f" is {num_shared}), but none of the first {first} layers has that type."
            )
        owners[layer] = same[-1]
    return owners


_FAMILIES: dict[str, Callable[[Config], list[Lifetime]]] = {
    "bamba": _bamba,
    "deepseek_v2": _full,
    "gemma2": _by_layer_types,
    "gemma3_text": _by_layer_types,
    "gemma3n_text": _by_layer_types,
    "gpt_oss": _by_layer_types,
    "granitemoehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "llama": _full,
    "llama4_text": _llama4,
    "mistral": _by_layer_types,
    "mixtral": _by_layer_types,
    "nemotron_h": _nemotron_h,
    "qwen2": _by_layer_types,
    "qwen2_moe": _by_layer_types,
    "qwen3": _by_layer_types,
    "qwen3_5_text": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_next,
    "qwen3_next": _qwen3_next,
}

# model_type -> (the field that declares it, what it asks for)
_REFUSED: dict[str, tuple[str, str]] = {
    "bailing_hybrid": ("layer_group_size", "lightning attention states"),
    "deepseek_v32": ("index_topk", "an indexer cache with sparse attention"),
    "deepseek_v4": ("compress_ratios", "compressed key rows"),
    "falcon_h1": ("mamba_n_heads", "attention and a state in the same layer"),
    "glm_moe_dsa": ("index_topk", "an indexer cache with sparse attention"),
    "inkling_text": ("number_of_conv_states", "attention and convolution states in the same layer"),
    "jamba": ("mamba_d_state", "Mamba-1 states"),
    "kimi_linear": ("linear_attn_config", "Kimi delta attention states"),
    "longcat_flash": ("num_layers", "two attention sub-layers in a layer"),
    "minimax": ("layer_types", "lightning attention states"),
    "minimax_m3_vl": ("sparse_attention_config", "block-sparse attention"),
    "qwen4_exp": ("indexer_budget", "an indexer cache with sparse attention"),
    "recurrent_gemma": ("block_types", "RG-LRU states"),
    "zamba": ("layers_block_type", "attention and a state in the same layer"),
    "zamba2": ("layers_block_type", "attention and a state in the same layer"),
    "zaya": ("cca_time0", "attention and convolution states in the same layer"),
}
