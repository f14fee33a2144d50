"""Rotary position embeddings: tables of angles for every rope type, and their application.

Built by models through `get_rope`, from rope settings in the form of
`transformers_utils/rope_config.py`. The arithmetic of applying a table is `_custom_ops/rope.py`.
Nothing here depends on the batch.

The angles of a token depend on its position alone, so that a token's bits do not depend on its
batch, on chunks or on what the prefix cache holds. Two types need a rule for that, since their
papers let the angles of all positions depend on the length of the sequence:

* dynamic: position p turns as in a sequence of p + 1 tokens. Equal to transformers for sequences
  within `max_position_embeddings`, and for tokens generated beyond it with a cache.
* longrope: one set of factors for the whole engine, the long ones if `max_model_len` exceeds
  `original_max_position_embeddings`. Equal to transformers for sequences on the same side of that
  length. Mixing both sets in one sequence would break the distances between its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vllm._custom_ops import rope as rope_ops
from vllm.errors import ConfigError

_MIN_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Everything that a table of angles depends on.

    Attributes:
        head_size: elements of a head.
        settings: rope settings of the config ("rope_type", "rope_theta", "factor" ...).
        max_positions: max_position_embeddings of the config.
        max_model_len: longest sequence that the engine serves.
    """

    head_size: int
    settings: Mapping[str, Any]
    max_positions: int
    max_model_len: int

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that turn; the first ones."""
        if self.settings["rope_type"] == "proportional":
            return self.head_size  # the rest of the head has frequency 0
        return int(self.head_size * self.settings.get("partial_rotary_factor", 1.0))

    @property
    def theta(self) -> float:
        """Base of the geometric series of frequencies."""
        return float(self.settings["rope_theta"])


def _exponents(spec: RopeSpec) -> Tensor:
    dim = spec.rotary_dim
    return torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim


def _frequencies_default(spec: RopeSpec) -> Tensor:
    return 1.0 / spec.theta ** _exponents(spec)


def _frequencies_linear(spec: RopeSpec) -> Tensor:
    """Positions divided by a factor (position interpolation, arXiv 2306.15595)."""
    return _frequencies_default(spec) / float(spec.settings["factor"])


def _frequencies_yarn(spec: RopeSpec) -> Tensor:
    """Fast frequencies kept, slow ones interpolated, a ramp between (arXiv 2309.00071, eq. 23)."""
    settings, dim = spec.settings, spec.rotary_dim
    factor = _yarn_factor(spec)
    trained_len = settings["original_max_position_embeddings"]

    def find_dim(num_turns: float) -> float:
        """Index of the frequency that makes `num_turns` turns within the trained length."""
        return dim * math.log(trained_len / (num_turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = find_dim(settings.get("beta_fast") or 32)
    high = find_dim(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    kept = 1 - ramp
    periods = spec.theta ** _exponents(spec)
    return (1.0 / (factor * periods)) * (1 - kept) + (1.0 / periods) * kept


def _frequencies_longrope(spec: RopeSpec) -> Tensor:
    """A factor for each frequency (arXiv 2402.13753); which set is the module's rule."""
    is_long = spec.max_model_len > spec.settings["original_max_position_embeddings"]
    name = "long_factor" if is_long else "short_factor"
    factors = torch.tensor(spec.settings[name], dtype=torch.float32, device="cpu")
    if factors.shape[0] != spec.rotary_dim // 2:
        raise ConfigError(
            f"{name} of the rope settings has {factors.shape[0]} numbers; a head of "
            f"{spec.rotary_dim} turning elements needs {spec.rotary_dim // 2}"
        )
    return 1.0 / (factors * spec.theta ** _exponents(spec))


def _frequencies_llama3(spec: RopeSpec) -> Tensor:
    """Slow frequencies divided by a factor, fast ones kept, a ramp in wavelength between."""
    settings = spec.settings
    factor, trained_len = settings["factor"], settings["original_max_position_embeddings"]
    slowest, fastest = settings["low_freq_factor"], settings["high_freq_factor"]
    frequencies = _frequencies_default(spec)
    num_turns = trained_len / (2 * math.pi / frequencies)
    kept = ((num_turns - slowest) / (fastest - slowest)).clamp(0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies


def _frequencies_proportional(spec: RopeSpec) -> Tensor:
    """The fastest part of a whole head's frequencies; the rest of the head stands still."""
    size = spec.head_size
    num_turning = int(spec.settings.get("partial_rotary_factor", 1.0) * size // 2)
    exponents = torch.arange(0, 2 * num_turning, 2, dtype=torch.float32, device="cpu") / size
    frequencies = torch.zeros(size // 2, device="cpu")
    frequencies[:num_turning] = 1.0 / spec.theta**exponents
    return frequencies / float(spec.settings.get("factor", 1.0))


_FREQUENCIES: dict[str, Callable[[RopeSpec], Tensor]] = {
    "default": _frequencies_default,
    "linear": _frequencies_linear,
    "dynamic": _frequencies_default,
    "yarn": _frequencies_yarn,
    "longrope": _frequencies_longrope,
    "llama3": _frequencies_llama3,
    "proportional": _frequencies_proportional,
}


def _yarn_factor(spec: RopeSpec) -> float:
    given = spec.settings.get("factor")
    if given is not None:
        return float(given)
    return spec.max_positions / spec.settings["original_max_position_embeddings"]


def compute_frequencies(spec: RopeSpec) -> Tensor:
    """Return radians per position of every turning pair, float32 [rotary_dim / 2].

    For "dynamic" they are those of positions below `max_positions`.

    Raises:
        ConfigError: a rope type that is not known.
    """
    kind = spec.settings["rope_type"]
    if kind not in _FREQUENCIES:
        raise ConfigError(f"rope_type {kind!r} is not known; allowed: {', '.join(_FREQUENCIES)}")
    return _FREQUENCIES[kind](spec)


def compute_attention_factor(spec: RopeSpec) -> float:
    """Return the factor of cosines and sines; other than 1 for yarn and longrope only."""
    settings = spec.settings
    kind = settings["rope_type"]
    if kind not in ("yarn", "longrope"):
        return 1.0
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    factor = _yarn_factor(spec)
    if kind == "longrope":
        trained_len = settings["original_max_position_embeddings"]
        return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(trained_len))
    numerator, denominator = settings.get("mscale"), settings.get("mscale_all_dim")
    if numerator and denominator:
        return _yarn_scale(factor, numerator) / _yarn_scale(factor, denominator)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def compute_table(spec: RopeSpec, first: int, last: int) -> Tensor:
    """Return cosines and sines of positions first … last - 1, float32 [positions, rotary_dim]."""
    positions = torch.arange(first, last, dtype=torch.float32, device="cpu")[:, None]
    frequencies = compute_frequencies(spec)[None, :]
    if spec.settings["rope_type"] == "dynamic" and last > spec.max_positions:
        frequencies = torch.where(
            positions < spec.max_positions, frequencies, _frequencies_grown(spec, positions)
        )
    angles = positions * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * compute_attention_factor(spec)


def _frequencies_grown(spec: RopeSpec, positions: Tensor) -> Tensor:
    """Frequencies of a sequence that ends at each position (NTK-aware scaling)."""
    factor, dim = float(spec.settings["factor"]), spec.rotary_dim
    stretch = factor * (positions + 1) / spec.max_positions - (factor - 1)
    base = spec.theta * stretch.clamp(min=1.0) ** (dim / (dim - 2))
    return 1.0 / base ** _exponents(spec)[None, :]


class RotaryEmbedding(nn.Module):
    """A table of angles that grows with the longest sequence seen, and its application.

    On a GPU it is whole from the start: growing would make a step wait for the host, and replace a
    tensor whose address CUDA graphs have recorded.

    Attributes:
        cos_sin: float32 [rows, rotary_dim], a row is the cosines, then the sines of a position.
    """

    cos_sin: Tensor

    def __init__(self, spec: RopeSpec, *, is_neox: bool = True) -> None:
        super().__init__()
        self.spec = spec
        self.is_neox = is_neox
        device = torch.get_default_device()
        num_rows = max(_MIN_ROWS, spec.max_model_len) if device.type == "cuda" else _MIN_ROWS
        rows = compute_table(spec, 0, num_rows)
        self.register_buffer("cos_sin", rows.to(device), persistent=False)

    def reserve(self, num_positions: int) -> None:
        """Make the table at least `num_positions` rows long; rows that exist keep their bits.

        The tensor is replaced when it grows; up to `max_model_len` that happens on a CPU only.
        """
        rows = self.cos_sin.shape[0]
        if num_positions <= rows:
            return
        more = compute_table(self.spec, rows, max(num_positions, 2 * rows))
        self.cos_sin = torch.cat((self.cos_sin, more.to(self.cos_sin.device)))

    def forward(self, positions_T: Tensor, query_THD: Tensor, key_THD: Tensor) -> None:
        """Turn query and key heads in place.

        Args:
            positions_T: int64; each below the number of rows reserved.
            query_THD: [T, heads, head_size].
            key_THD: [T, kv heads, head_size].
        """
        rope_ops.rotary_embedding(
            positions_T, query_THD, key_THD, self.spec.head_size, self.cos_sin, self.is_neox
        )


def get_rope(
    head_size: int,
    settings: Mapping[str, Any],
    *,
    max_positions: int,
    max_model_len: int,
    is_neox: bool = True,
) -> RotaryEmbedding:
    """Return the rotary embedding for one group of rope settings.

    Args:
        head_size: elements of a head.
        settings: {"rope_type", "rope_theta", what the type needs}, as `rope_config` has them.
        max_positions: max_position_embeddings of the config.
        max_model_len: longest sequence that the engine serves.
        is_neox: whether element i turns with i + half, or even ones with their neighbours.

    Raises:
        ConfigError: a rope type that is not known, or settings that do not fit the head.
    """
    spec = RopeSpec(
        head_size=head_size,
        settings=settings,
        max_positions=max_positions,
        max_model_len=max_model_len,
    )
    if spec.rotary_dim < 2 or spec.rotary_dim % 2:
        raise ConfigError(
            f"the turning part of a head must be even and at least 2, got {spec.rotary_dim} "
            f"(head size {head_size})"
        )
    return RotaryEmbedding(spec, is_neox=is_neox)
