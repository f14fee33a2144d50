"""What the draws of a step need beside the logits, as columns on the device.

Held by the sampler. Decode steps sample the same rows in the same order, so that columns are made
once for each set of rows: a step after it copies nothing to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm.model_executor.layers.sampling_state import SamplingState
from vllm.model_executor.layers.transfer import upload


class DrawRequest(Protocol):
    """The part of a SampleRequest that is read here."""

    @property
    def state(self) -> SamplingState: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def num_outputs(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawParameters:
    """Arguments of the `sample` op, one item a draw."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seeds: Tensor
    offsets: Tensor

    @property
    def filters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Arguments of the `filter_logits` op."""
        return self.temperature, self.top_p, self.top_k, self.min_p


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawColumns:
    """Columns of the draws of a step: the samples of the first row, then of the second, and so on.

    Attributes:
        parameters: None where every draw takes the most likely token.
        rows: int64 [draws], the row that each draw reads; None where every row has one draw.
        first_draws: int64 [rows], the first draw of each row; None likewise.
        wanted: the draws with logprobs, in ascending order.
        wanted_rows: int64, the same on the device; None where no draw has any, or all have.
        num_logprobs: for each of `wanted`, how many alternatives.
    """

    parameters: DrawParameters | None
    rows: Tensor | None
    first_draws: Tensor | None
    wanted: tuple[int, ...]
    wanted_rows: Tensor | None
    num_logprobs: tuple[int, ...]


class DrawColumnCache:
    """Makes columns, and keeps those of the last step."""

    def __init__(self) -> None:
        self._states: list[SamplingState] = []
        self._samples: list[int] = []
        self._offsets: list[int] = []
        self._columns: DrawColumns | None = None
        self._device = torch.device("cpu")

    def get(self, requests: Sequence[DrawRequest], device: torch.device) -> DrawColumns:
        """Return the columns of a step's draws."""
        columns = self._columns
        if columns is None or device != self._device or not self._has_rows_of(requests):
            self._states = [r.state for r in requests]
            self._samples = [r.num_samples for r in requests]
            self._device = device
            self._offsets = _list_offsets(requests)
            columns = make_columns(requests, self._offsets, device)
        elif columns.parameters is not None:
            columns = replace(columns, parameters=self._move(columns.parameters, requests))
        self._columns = columns
        return columns

    def _has_rows_of(self, requests: Sequence[DrawRequest]) -> bool:
        return [r.num_samples for r in requests] == self._samples and all(
            r.state is state for r, state in zip(requests, self._states, strict=True)
        )

    def _move(self, parameters: DrawParameters, requests: Sequence[DrawRequest]) -> DrawParameters:
        """Return the parameters of the same draws at other places of their random streams."""
        before, self._offsets = self._offsets, _list_offsets(requests)
        if self._offsets == before:
            return parameters
        if self._offsets == [offset + 1 for offset in before]:
            return replace(parameters, offsets=parameters.offsets + 1)
        offsets = np.array(self._offsets, dtype=np.int64)
        return replace(parameters, offsets=upload([offsets], self._device)[0])


def _list_offsets(requests: Sequence[DrawRequest]) -> list[int]:
    return [r.num_outputs for r in requests for _ in range(r.num_samples)]


def make_columns(
    requests: Sequence[DrawRequest], offsets: Sequence[int], device: torch.device
) -> DrawColumns:
    """Build the columns of a step and copy them to the device at once."""
    draws = [(r.state, i) for r in requests for i in range(r.num_samples)]
    arrays: dict[str, NDArray[Any]] = {}
    if not all(state.params.is_greedy for state, _ in draws):
        params = [state.params for state, _ in draws]
        arrays = {
            "seeds": np.array([s.get_stream_seed(i) for s, i in draws], dtype=np.int64),
            "offsets": np.array(offsets, dtype=np.int64),
            "temperature": np.array([p.temperature for p in params], dtype=np.float32),
            "top_p": np.array([p.top_p for p in params], dtype=np.float32),
            "top_k": np.array([p.top_k for p in params], dtype=np.int32),
            "min_p": np.array([p.min_p for p in params], dtype=np.float32),
        }
    names = tuple(arrays)
    if any(r.num_samples != 1 for r in requests):
        samples = np.array([r.num_samples for r in requests], dtype=np.int64)
        arrays["rows"] = np.repeat(np.arange(len(requests), dtype=np.int64), samples)
        arrays["first_draws"] = np.cumsum(samples) - samples
    wanted = tuple(i for i, (s, _) in enumerate(draws) if s.params.num_logprobs is not None)
    if wanted and len(wanted) < len(draws):
        arrays["wanted_rows"] = np.array(wanted, dtype=np.int64)
    tensors: dict[str, Tensor] = {}
    if arrays:
        tensors = dict(zip(arrays, upload(list(arrays.values()), device), strict=True))
    return DrawColumns(
        parameters=DrawParameters(**{name: tensors[name] for name in names}) if names else None,
        rows=tensors.get("rows"),
        first_draws=tensors.get("first_draws"),
        wanted=wanted,
        wanted_rows=tensors.get("wanted_rows"),
        num_logprobs=tuple(draws[i][0].params.num_logprobs or 0 for i in wanted),
    )
