"""The asynchronous engine, its core in a thread and in a process: the same streams and ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from tests.utils.one_thread import one_thread  # noqa: F401  a fixture for the whole module
from tests.utils.tiny_models import TinyModels
from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.engine.client import ProcessCore
from vllm.errors import RequestError
from vllm.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    RequestOutputKind,
)

SPELLING = {ord("C"): 257, 257: ord("G"), ord("G"): 258, 258: ord("J"), ord("J"): ord("K"), 65: 65}
LONG = {"prompt_token_ids": [65]}  # A leads to A for ever
NUM_BLOCKS = 1024  # 16,384 tokens: no request that a test interrupts ends by itself before


def args(model: object, **options) -> AsyncEngineArgs:
    return AsyncEngineArgs(
        model=str(model),
        dtype="float32",
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_seqs=16,
        **options,
    )


@pytest.fixture(scope="module", params=["thread", "process"])
def engine(request: pytest.FixtureRequest, tiny_models: TinyModels):
    made = AsyncLLMEngine.from_engine_args(
        args(tiny_models.chain(SPELLING, max_position_embeddings=16 * NUM_BLOCKS)),
        in_own_process=request.param == "process",
    )
    yield made
    made.shutdown()
    assert made.is_stopped
    assert not made.errored


@pytest.fixture
def run(engine: AsyncLLMEngine) -> Callable:
    """Run a coroutine on a loop of its own; the engine moves from loop to loop."""

    def run_one(coroutine):
        return asyncio.run(asyncio.wait_for(coroutine, 60))

    return run_one


async def collect(stream: AsyncIterator) -> list:
    return [output async for output in stream]


def greedy(**fields) -> SamplingParams:
    fields = {"max_tokens": 5, "output_kind": RequestOutputKind.DELTA, **fields}
    return SamplingParams(temperature=0, **fields)


def test_a_stream_of_deltas(engine: AsyncLLMEngine, run) -> None:
    outputs = run(collect(engine.generate("ABC", greedy(), "r1")))
    assert [o.outputs[0].text for o in outputs] == ["DEF", "G", "HI", "J", "K"]
    assert [o.finished for o in outputs] == [False] * 4 + [True]
    assert outputs[-1].outputs[0].finish_reason == "length"
    final = run(
        collect(engine.generate("ABC", greedy(output_kind=RequestOutputKind.FINAL_ONLY), "r2"))
    )
    assert [o.outputs[0].text for o in final] == ["DEFGHIJK"]


def test_streams_side_by_side(engine: AsyncLLMEngine, run) -> None:
    async def many() -> list:
        jobs = [
            collect(engine.generate("ABC", greedy(max_tokens=1 + i % 6), f"s{i}"))
            for i in range(24)
        ]
        return await asyncio.gather(*jobs)

    for i, outputs in enumerate(run(many())):
        assert sum(len(o.outputs[0].token_ids) for o in outputs) == 1 + i % 6
        assert (
            "".join(o.outputs[0].text for o in outputs) == "DEFGHIJK"[: [3, 4, 6, 7, 8, 8][i % 6]]
        )


def test_stop_strings_reach_the_engine_side(engine: AsyncLLMEngine, run) -> None:
    async def go() -> None:
        params = greedy(max_tokens=None, stop="AAA", ignore_eos=True)
        outputs = await collect(engine.generate(LONG, params, "stop"))
        assert "".join(o.outputs[0].text for o in outputs) == ""
        assert outputs[-1].outputs[0].stop_reason == "AAA"
        await until_idle(engine)

    run(go())


async def until_idle(engine: AsyncLLMEngine) -> None:
    """All requests gone and all blocks free, within two seconds."""
    deadline = time.monotonic() + 2
    while True:
        stats = await engine.stats()
        if stats.num_running_requests == stats.num_waiting_requests == 0:
            assert stats.num_free_gpu_blocks == stats.num_total_gpu_blocks == NUM_BLOCKS
            return
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.01)


def test_one_of_several_answers_stops(engine: AsyncLLMEngine, run) -> None:
    async def go() -> None:
        params = SamplingParams(
            n=3,
            temperature=1.0,
            max_tokens=400,
            stop="DEFG",
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        outputs = await collect(engine.generate("C", params, "n"))
        assert {a.stop_reason for a in outputs[-1].outputs} == {"DEFG"}
        await until_idle(engine)

    run(go())


@pytest.mark.parametrize("end", ["abort", "close", "cancel"])
def test_requests_end_at_any_moment(engine: AsyncLLMEngine, run, end: str) -> None:
    async def go() -> None:
        stream = engine.generate(LONG, greedy(max_tokens=None), f"long-{end}")
        first = await anext(stream)
        assert not first.finished
        assert (await engine.stats()).num_running_requests == 1
        if end == "abort":
            await engine.abort(f"long-{end}")
            rest = await collect(stream)
            assert rest[-1].finished
            assert rest[-1].outputs[0].finish_reason == "abort"
        elif end == "close":
            await stream.aclose()
        else:
            task = asyncio.create_task(collect(stream))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until_idle(engine)
        await engine.abort("unknown")

    run(go())


def test_gauges_describe_now_after_a_mass_abort(engine: AsyncLLMEngine, run) -> None:
    """Case C47."""
    from prometheus_client import REGISTRY

    def gauge(name: str) -> float:
        model = engine.engine_config.model_config.served_model_name
        return REGISTRY.get_sample_value(f"vllm:{name}", {"model_name": model})

    async def go() -> None:
        streams = [engine.generate(LONG, greedy(max_tokens=None), f"mass-{i}") for i in range(12)]
        await asyncio.gather(*(anext(s) for s in streams))
        assert gauge("num_requests_running") == 12
        assert gauge("gpu_cache_usage_perc") > 0
        aborted = gauge_of_aborts()
        for stream in streams:
            await stream.aclose()
        await until_idle(engine)
        await asyncio.sleep(0.05)
        assert gauge("num_requests_running") == gauge("num_requests_waiting") == 0
        assert gauge("gpu_cache_usage_perc") == 0
        assert gauge_of_aborts() == aborted + 12

    def gauge_of_aborts() -> float:
        model = engine.engine_config.model_config.served_model_name
        return REGISTRY.get_sample_value(
            "vllm:request_success_total", {"model_name": model, "finished_reason": "abort"}
        )

    run(go())


def test_wrong_requests_fail_alone(engine: AsyncLLMEngine, run) -> None:
    async def go() -> None:
        neighbour = asyncio.create_task(collect(engine.generate("ABC", greedy(), "ok")))
        for i, (prompt, params, error) in enumerate(
            [
                ("", greedy(), "the prompt is empty"),
                ("A" * 16 * NUM_BLOCKS, greedy(), f"at most {16 * NUM_BLOCKS - 1}"),
                ("A", greedy(guided_decoding=GuidedDecodingParams(regex="[")), "guided_regex"),
                (
                    "A",
                    greedy(guided_decoding=GuidedDecodingParams(json={"type": "x"})),
                    "guided_json",
                ),
                ("A", greedy(logit_bias={9999: 1.0}), "logit_bias"),
            ]
        ):
            with pytest.raises(RequestError, match=error):
                await collect(engine.generate(prompt, params, f"bad-{i}"))
        with pytest.raises(TypeError):
            await collect(engine.generate(7, greedy(), "type"))
        assert (await neighbour)[-1].finished
        await engine.check_health()
        await until_idle(engine)

    run(go())


def test_ids_must_differ(engine: AsyncLLMEngine, run) -> None:
    async def go() -> None:
        stream = engine.generate(LONG, greedy(max_tokens=None), "twice")
        await anext(stream)
        with pytest.raises(KeyError, match="running already"):
            await collect(engine.generate(LONG, greedy(), "twice"))
        assert not (await anext(stream)).finished, "the first goes on"
        await stream.aclose()

    run(go())


def test_an_id_is_free_again_at_once(engine: AsyncLLMEngine, run) -> None:
    async def go() -> None:
        for _ in range(20):
            stream = engine.generate(LONG, greedy(max_tokens=None), "same")
            await anext(stream)
            await stream.aclose()
            outputs = await collect(engine.generate("ABC", greedy(), "same"))
            assert "".join(o.outputs[0].text for o in outputs) == "DEFGHIJK"
        await until_idle(engine)

    run(go())


def test_structured_output(engine: AsyncLLMEngine, run) -> None:
    async def go() -> None:
        jobs = [
            collect(engine.generate("C", greedy(max_tokens=30, guided_decoding=form), f"g{i}"))
            for i, form in enumerate(
                [
                    GuidedDecodingParams(regex="x{3}y"),
                    GuidedDecodingParams(choice=["only this"]),
                    GuidedDecodingParams(json={"const": 7}),
                ]
            )
        ]
        answers = await asyncio.gather(*jobs)
        texts = ["".join(o.outputs[0].text for o in a) for a in answers]
        assert texts == ["xxxy", "only this", "7"]
        await until_idle(engine)

    run(go())


def test_logits_processors_need_the_same_process(engine: AsyncLLMEngine, run) -> None:
    def force(output_ids, logits):
        logits[ord("x")] = 1e6
        return logits

    job = collect(engine.generate("C", greedy(max_tokens=1, logits_processors=[force]), "p"))
    if isinstance(engine._core, ProcessCore):
        with pytest.raises(RequestError, match="cannot cross to the engine process"):
            run(job)
    else:
        assert run(job)[0].outputs[0].text == "x"


def test_beam_search(engine: AsyncLLMEngine, run) -> None:
    (output,) = run(
        collect(engine.beam_search("ABC", "b", BeamSearchParams(beam_width=2, max_tokens=7)))
    )
    assert output.finished
    assert [a.index for a in output.outputs] == [0, 1]
    assert output.outputs[0].text == "DEFGHIJK"
    assert output.outputs[0].token_ids[:3] == [65, 66, 67]
    assert output.outputs[0].finish_reason == "stop"


def test_state_and_config(engine: AsyncLLMEngine, run) -> None:
    async def go() -> None:
        assert (await engine.get_model_config()).max_model_len == NUM_BLOCKS * 16
        assert (await engine.get_tokenizer()).eos_token_id == 264
        assert (await engine.get_scheduler_config()).max_num_seqs == 16
        assert not await engine.is_tracing_enabled()
        stats = await engine.stats()
        assert stats.scheduler_running
        assert set(stats.kernels) == {0, 1}
        assert stats.startup["num_cache_tokens"] == NUM_BLOCKS * 16
        with pytest.raises(RequestError, match="embedding"):
            await engine.encode("A", None, "e")
        with pytest.raises(RequestError, match="embedding"):  # 0.6.3's form
            async for _ in engine.encode("A", None, "e"):
                pass
        with pytest.raises(RuntimeError, match="already running"):
            engine.start_background_loop()

    run(go())
    assert engine.is_running
    assert not engine.errored
