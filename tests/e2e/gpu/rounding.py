"""What rounding costs: how far the logprobs of an engine are from those of an exact one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.e2e.gpu.engines import Answer, find_gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Differences from the exact logprobs over all positions of some answers.

    Positions are those of the prompts, and of the generated tokens up to the first that differs.

    Attributes:
        typical: their median. A wrong number anywhere in a model moves it at every position.
        largest: their maximum. In mixtures of experts it is where another expert was chosen.
        widest_tie: distance of the exact engine's two best tokens where an answer leaves its own,
            the widest of them.
    """

    typical: float
    largest: float
    widest_tie: float


def measure_rounding(answers: Sequence[Answer], exact: Sequence[Answer]) -> Rounding:
    """Compare answers with the exact ones to the same prompts."""
    gaps: list[float] = []
    ties = [0.0]
    for ours, reference in zip(answers, exact, strict=True):
        gaps += map(find_gap, ours.prompt_logprobs, reference.prompt_logprobs)
        for i in _list_comparable(ours, reference):
            gaps.append(find_gap(ours.logprobs[i], reference.logprobs[i]))
            if ours.token_ids[i] != reference.token_ids[i]:
                best = sorted(reference.logprobs[i].values(), reverse=True)
                ties.append(best[0] - best[1])
    return Rounding(typical=statistics.median(gaps), largest=max(gaps), widest_tie=max(ties))


def _list_comparable(ours: Answer, reference: Answer) -> Iterator[int]:
    for i, (a, b) in enumerate(zip(ours.token_ids, reference.token_ids, strict=True)):
        yield i
        if a != b:
            return


def check_rounding(found: Rounding, cost: Rounding) -> None:
    """Demand that an engine rounds no worse than a type itself costs.

    Args:
        found: of the engine under test.
        cost: of another engine with weights and activations of the same type.

    Raises: AssertionError where the median is above 1.5 times the other's and 0.004, the maximum
    above 3 times the other's and 0.02, or where answers part although two roundings of that size
    could not have changed the order.
    """
    assert found.typical <= 1.5 * cost.typical + 0.004, f"{found} beside {cost}"
    largest = 3 * cost.largest + 0.02
    assert found.largest <= largest, f"{found} beside {cost}"
    assert found.widest_tie <= 2 * largest, f"{found} beside {cost}"
