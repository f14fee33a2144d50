"""The end of an engine: killed, stuck, failing, or left alone by the process that made it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.utils.fixtures_models import make_reach_prompt
from tests.utils.one_thread import one_thread  # noqa: F401  a fixture for the whole module
from tests.utils.tiny_models import TinyModels
from vllm import LLM, AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.engine.client import ProcessCore
from vllm.errors import ConfigError, EngineDeadError
from vllm.sampling_params import GuidedDecodingParams, RequestOutputKind

NUM_BLOCKS = 1024
LONG = {"prompt_token_ids": [65]}  # A leads to A for ever
ENDLESS = SamplingParams(temperature=0, max_tokens=None, output_kind=RequestOutputKind.DELTA)


def endless(tiny_models: TinyModels) -> Path:
    """The loop model with room enough that a request does not end before it is interrupted."""
    return tiny_models.chain({65: 65}, max_position_embeddings=16 * NUM_BLOCKS)


def args(model: object, **options) -> AsyncEngineArgs:
    return AsyncEngineArgs(
        model=str(model),
        dtype="float32",
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_seqs=16,
        **options,
    )


async def collect(stream: AsyncIterator) -> list:
    return [output async for output in stream]


def make_process_engine(model: object, **options) -> tuple[AsyncLLMEngine, ProcessCore]:
    config = args(model, **options).create_engine_config()
    core = ProcessCore(config)
    return AsyncLLMEngine(config, core), core


def test_an_engine_process_answers_like_an_engine_in_this_one(tiny_models: TinyModels) -> None:
    model = tiny_models.reach("llama", num_hidden_layers=2)
    prompts = [{"prompt_token_ids": make_reach_prompt(n, seed=n)} for n in (1, 17, 60)]
    form = GuidedDecodingParams(regex="[a-f]{6}")
    params = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=9, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0, max_tokens=9, guided_decoding=form),
    ]
    options = {"dtype": "float32", "num_gpu_blocks_override": 64}
    llm = LLM(str(model), **options)
    expected = llm.generate(prompts, params, use_tqdm=False)
    engine, _ = make_process_engine(model)

    async def go() -> list:
        jobs = []
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            one.output_kind = RequestOutputKind.FINAL_ONLY
            jobs.append(collect(engine.generate(prompt, one, str(i))))
        return await asyncio.gather(*jobs)

    answers = asyncio.run(asyncio.wait_for(go(), 60))
    engine.shutdown()
    for (answer,), reference in zip(answers, expected, strict=True):
        assert answer.outputs == reference.outputs
        assert answer.prompt_logprobs == reference.prompt_logprobs
        assert answer.prompt_token_ids == reference.prompt_token_ids


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


def wait_for_end(pid: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not has_ended(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


def test_a_killed_engine_process_is_noticed_at_once(tiny_models: TinyModels) -> None:
    engine, core = make_process_engine(endless(tiny_models))

    async def go() -> None:
        streams = [engine.generate(LONG, ENDLESS, f"r{i}") for i in range(4)]
        await asyncio.gather(*(anext(s) for s in streams))
        killed_s = time.monotonic()
        os.kill(core.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
                await collect(stream)
        assert time.monotonic() - killed_s < 2
        assert engine.errored
        assert not engine.is_running
        assert not (await engine.stats()).scheduler_running
        for attempt in (engine.check_health(), collect(engine.generate(LONG, ENDLESS, "later")),
                        engine.abort("r0")):  # fmt: skip
            with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
                await attempt

    asyncio.run(asyncio.wait_for(go(), 30))
    engine.shutdown()
    engine.shutdown()


def test_a_stuck_engine_process_is_noticed(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RPC_TIMEOUT", "1500")
    engine, core = make_process_engine(endless(tiny_models))

    async def go() -> None:
        stream = engine.generate(LONG, ENDLESS, "r")
        await anext(stream)
        os.kill(core.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="has not been heard of"):
            await collect(stream)

    asyncio.run(asyncio.wait_for(go(), 30))
    os.kill(core.pid, signal.SIGCONT)
    engine.shutdown()
    wait_for_end(core.pid, 20)


def test_a_failing_step_ends_the_engine_with_its_cause(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.worker.model_runner import ModelRunner

    engine = AsyncLLMEngine.from_engine_args(args(endless(tiny_models)))

    def fail(self, plan):
        raise RuntimeError("the device is on fire")

    async def go() -> None:
        stream = engine.generate(LONG, ENDLESS, "r")
        await anext(stream)
        monkeypatch.setattr(ModelRunner, "execute", fail)
        with pytest.raises(EngineDeadError, match="the device is on fire"):
            await collect(stream)
        with pytest.raises(EngineDeadError, match="the device is on fire"):
            await engine.check_health()

    asyncio.run(asyncio.wait_for(go(), 30))
    engine.shutdown()


@pytest.mark.parametrize("in_own_process", [True, False])
def test_a_start_that_fails_says_why(tiny_models: TinyModels, in_own_process: bool) -> None:
    with pytest.raises(ConfigError, match="lower max_model_len"):
        AsyncLLMEngine.from_engine_args(
            AsyncEngineArgs(
                model=str(tiny_models.loop()), num_gpu_blocks_override=4, dtype="float32"
            ),
            in_own_process=in_own_process,
        )


PARENT = """
import asyncio, sys, time
from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
args = AsyncEngineArgs(model=sys.argv[1], dtype="float32", num_gpu_blocks_override=64)
engine = AsyncLLMEngine.from_engine_args(args, in_own_process=sys.argv[2] == "process")
async def leave_in_the_middle():
    params = SamplingParams(temperature=0, max_tokens=None)
    await anext(engine.generate({"prompt_token_ids": [65]}, params, "r"))
    print(engine._core.pid if sys.argv[2] == "process" else 0, "torch" in sys.modules, flush=True)
    if sys.argv[3] == "stay":
        time.sleep(60)
    sys.exit(7)
asyncio.run(leave_in_the_middle())
"""


@pytest.mark.parametrize(
    ("where", "then"), [("process", "stay"), ("process", "leave"), ("thread", "leave")]
)
def test_the_engine_ends_with_the_process_that_made_it(
    tiny_models: TinyModels, tmp_path: Path, where: str, then: str
) -> None:
    """Killed while it runs, or left in the middle of a request: nothing stays behind."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny_models.loop()), where, then],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "VLLM_RPC_BASE_PATH": str(tmp_path)},
    )
    try:
        assert parent.stdout is not None
        pid, has_torch = parent.stdout.readline().split()
        if then == "stay":
            assert has_torch == "False", "the API process stays light"
            assert not has_ended(int(pid))
            parent.kill()
        assert parent.wait(30) == (-signal.SIGKILL if then == "stay" else 7)
    finally:
        parent.kill()
        parent.wait()
    if where == "process":
        wait_for_end(int(pid), 10)
    assert list(tmp_path.iterdir()) == [], "no socket is left behind"
