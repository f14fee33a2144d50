"""Late outputs over mixes of lifetimes: states carry what was really consumed."""

from __future__ import annotations

import random

import pytest

from tests.core.late_outputs import LateSchedule
from tests.hybrid.core.test_hybrid_schedules import draw_harness, list_others

NUM_STEPS = 500


@pytest.mark.parametrize("seed", range(8))
def test_random_steps_whose_outputs_come_late(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(f"late {seed}")
    harness, max_len = draw_harness(rng)
    LateSchedule(harness, rng, max_len, list_others).run(NUM_STEPS)
