"""Two ranks in processes of their own: the tokens of one, and no way to end unnoticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.utils.overlap import allow_steps
from tests.utils.tiny_engine import make_config, make_first_plan, make_layout, run_steps
from vllm.errors import ConfigError, EngineDeadError
from vllm.executor import make_executor
from vllm.executor.multiproc_executor import MultiprocExecutor
from vllm.executor.worker_process import find_rank_folder
from vllm.step import PlanRow, RowSampling, StepPlan

PROMPTS = [[3, 4, 5] * 7, [9], [100, 200, 300, 1]]
SAMPLING = [
    RowSampling(temperature=0.0, num_prompt_logprobs=1),
    RowSampling(temperature=1.0, seed=3),
    RowSampling(temperature=0.7, seed=4, num_logprobs=2, repetition_penalty=1.2),
]


def prefer_seven(output_ids, logits):
    logits[7] += 1000.0
    return logits


def start(ranks: int = 2, **config) -> MultiprocExecutor:
    executor = make_executor(make_config(ranks, **config))
    executor.initialize_cache(make_layout(executor))
    return executor


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[MultiprocExecutor]:
    """Shared by the tests that leave it alive; each drops the rows that it made."""
    executor = start()
    yield executor
    executor.shutdown()
    assert all(not is_alive(pid) for pid in executor.rank_pids())


@pytest.fixture
def clean(two_ranks: MultiprocExecutor) -> Iterator[MultiprocExecutor]:
    yield two_ranks
    two_ranks.submit(StepPlan(step=999, dropped=[0, 1, 2])).wait()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until_gone(pids: tuple[int, ...], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s, f"of {pids} some still run after {limit_s} s"
        time.sleep(0.05)


def test_two_ranks_equal_one(clean: MultiprocExecutor) -> None:
    first = make_first_plan(PROMPTS, SAMPLING)
    one = make_executor(make_config(1))
    one.initialize_cache(make_layout(one))
    expected = run_steps(one, first, 12)
    one.shutdown()
    found = run_steps(clean, first, 12)
    for expected_rows, found_rows in zip(expected, found, strict=True):
        for a, b in zip(expected_rows, found_rows, strict=True):
            assert (a.seq_id, a.token_ids, a.error) == (b.seq_id, b.token_ids, b.error)
            for x, y in zip(
                [*(a.logprobs or []), *(a.prompt_logprobs or [])],
                [*(b.logprobs or []), *(b.prompt_logprobs or [])],
                strict=True,
            ):
                assert x.token_ids == y.token_ids
                assert x.logprobs == pytest.approx(y.logprobs, abs=1e-3)
    assert found[0][0].prompt_logprobs
    assert found[3][2].logprobs


def test_each_rank_reports_its_own_share(two_ranks: MultiprocExecutor) -> None:
    reports = two_ranks.reports()
    assert [r.rank for r in reports] == [0, 1]
    for report in reports:
        assert [f.shape for f in report.cache_specs[0].fields] == [(1, 32), (1, 32)]
        assert {k.kernel for k in report.kernels} == {"cpu"}


def test_processors_travel_or_fail_their_row(clean: MultiprocExecutor) -> None:
    processors = [(prefer_seven,), (), (lambda ids, logits: logits,)]
    rows = clean.submit(make_first_plan(PROMPTS, SAMPLING, processors)).wait().rows
    assert rows[0].token_ids == [7]
    assert rows[1].error is None
    assert "logits processors must be importable" in rows[2].error


def test_tickets_may_be_waited_for_in_any_order(clean: MultiprocExecutor) -> None:
    first = make_first_plan(PROMPTS, SAMPLING)
    tickets = [clean.submit(first), clean.submit(StepPlan(step=1, dropped=[0]))]
    assert [t.wait().step for t in reversed(tickets)] == [1, 0]


def test_ranks_take_a_plan_while_a_step_runs() -> None:
    first = make_first_plan(PROMPTS, SAMPLING)
    one = make_executor(make_config(1))
    one.initialize_cache(make_layout(one))
    expected = run_steps(one, first, 3)
    one.shutdown()
    executor = make_executor(allow_steps(make_config(2), 2))
    executor.initialize_cache(make_layout(executor))
    lens = {row.seq_id: row.num_new_tokens for row in first.rows}
    tickets = [executor.submit(first)]
    found = []
    for step in (1, 2):
        rows = [
            PlanRow(
                seq_id=seq_id,
                num_computed_tokens=length + step - 1,
                num_new_tokens=1,
                new_block_ids=([],),
            )
            for seq_id, length in lens.items()
        ]
        tickets.append(executor.submit(StepPlan(step=step, rows=rows)))
        found.append(tickets.pop(0).wait().rows)
    found.append(tickets.pop().wait().rows)
    assert [[r.token_ids for r in rows] for rows in found] == [
        [r.token_ids for r in rows] for rows in expected
    ]
    executor.submit(StepPlan(step=8, dropped=[1]))
    executor.submit(StepPlan(step=9, dropped=[0]))
    executor.shutdown()  # does not wait for anybody's tickets
    wait_until_gone(executor.rank_pids(), 5)


@pytest.mark.timeout(60)
def test_large_plans_and_outputs_do_not_wait_for_each_other(clean: MultiprocExecutor) -> None:
    """More bytes in both directions than sockets hold, with two steps under way."""
    prompts = [[(i * 7 + j) % 300 for j in range(75)] for i in range(3)]
    sampling = [RowSampling(temperature=0.0, num_prompt_logprobs=300)] * 3
    first = clean.submit(make_first_plan(prompts, sampling))
    second = clean.submit(StepPlan(step=1, token_masks={77: bytes(4 << 20)}))
    rows = first.wait().rows
    assert [len(row.prompt_logprobs) for row in rows] == [74] * 3
    assert second.wait().rows == []


def test_an_idle_rank_that_is_killed_is_named() -> None:
    executor = start()
    executor.check_health()
    folder = find_rank_folder(Path(executor._directory.name, "rendezvous").as_uri())
    folder.mkdir()
    (folder / "of a kernel").touch()
    os.kill(executor.rank_pids()[1], signal.SIGKILL)
    deadline_s = time.monotonic() + 5
    with pytest.raises(EngineDeadError, match="rank 1 was killed by SIGKILL"):
        while time.monotonic() < deadline_s:
            executor.check_health()
            time.sleep(0.02)
    with pytest.raises(EngineDeadError, match="rank 1"):
        executor.submit(make_first_plan(PROMPTS, SAMPLING))
    wait_until_gone(executor.rank_pids(), 5)
    executor.shutdown()
    executor.shutdown()
    assert not folder.parent.exists(), "nothing is left behind"


def test_a_rank_that_dies_in_a_step_ends_it_within_seconds() -> None:
    executor = start()
    os.kill(executor.rank_pids()[1], signal.SIGSTOP)
    ticket = executor.submit(make_first_plan(PROMPTS, SAMPLING))
    os.kill(executor.rank_pids()[1], signal.SIGKILL)
    started_s = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 was killed by SIGKILL"):
        ticket.wait()
    assert time.monotonic() - started_s < 5
    wait_until_gone(executor.rank_pids(), 5)
    executor.shutdown()


def test_a_step_that_fails_brings_its_traceback() -> None:
    executor = start()
    first = make_first_plan(PROMPTS, SAMPLING)
    executor.submit(first).wait()
    with pytest.raises(
        EngineDeadError, match=r"(?s)rank \d failed: AssertionError.*Traceback.*_add"
    ):
        executor.submit(first).wait()  # the same sequences enter twice
    executor.shutdown()


def test_what_cannot_be_served_is_said_as_in_one_process() -> None:
    with pytest.raises(ConfigError) as one:
        make_executor(make_config(1, architectures=["NoSuchForCausalLM"]))
    with pytest.raises(ConfigError) as two:
        make_executor(make_config(2, architectures=["NoSuchForCausalLM"]))
    assert str(one.value) == str(two.value)


@pytest.mark.parametrize(
    ("given", "name"), [({"pipeline": 2}, "pipeline"), ({"backend": "ray"}, "ray")]
)
def test_what_follows_later_is_refused(given: dict, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make_executor(make_config(1, **given))


_ENGINE = """
import sys, time
from tests.executor.test_multiproc_executor import start
executor = start()
print(executor._directory.name, *executor.rank_pids(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_ranks_do_not_outlive_the_engine(sign: signal.Signals) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", _ENGINE],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with engine:
        folder, *numbers = engine.stdout.readline().split()
        pids = tuple(int(pid) for pid in numbers)
        assert len(pids) == 2
        assert Path(folder).is_dir()
        engine.send_signal(sign)
    wait_until_gone(pids, 10)
    assert not Path(folder).exists(), "nothing of a killed engine is left behind"
