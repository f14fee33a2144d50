"""The core above ranks that write what the test tells them to: forms, failures, counts."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest

from tests.utils.fixtures_models import build_chain_tokenizer
from vllm.cache_spec import CacheField, CacheLayout, Full, LayerCacheSpec
from vllm.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from vllm.engine import core as core_module
from vllm.engine.core import EngineCore, make_core
from vllm.engine.core_loop import CoreLoop, QueueInbox
from vllm.engine.messages import (
    AbortRequests,
    AddRequest,
    EndBranches,
    EngineFailed,
    EngineOutputs,
    GrammarSpec,
    SetTokenizer,
    Shutdown,
)
from vllm.errors import ConfigError, EngineDeadError, RequestError
from vllm.executor.abstract import RankReport
from vllm.sequence import SequenceRequest
from vllm.step import RowOutput, RowSampling, StepOutput, StepPlan
from vllm.types import DType, FinishReason

VOCAB, EOS = 320, 264


class Ticket:
    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def wait(self) -> StepOutput:
        return self._output


class Ranks:
    """An executor that always writes token 65 and remembers what it was told."""

    def __init__(self, block_tokens: tuple[int, ...] = (8, 16, 32)) -> None:
        self.plans: list[StepPlan] = []
        self.error: Exception | None = None
        self.is_shut_down = False
        self._block_tokens = block_tokens

    def reports(self) -> tuple[RankReport, ...]:
        fields = tuple(CacheField(name=n, shape=(2, 64), dtype=DType.FLOAT32) for n in "kv")
        return (
            RankReport(
                rank=0,
                cache_specs=(LayerCacheSpec(layer=0, fields=fields, lifetime=Full()),),
                cache_bytes=1 << 20,
                kernels=(),
                block_tokens=self._block_tokens,
                weight_bytes=1,
                load_seconds=0.0,
            ),
        )

    def initialize_cache(self, layout: CacheLayout) -> None:
        self.layout = layout

    def submit(self, plan: StepPlan) -> Ticket:
        if self.error is not None:
            raise self.error
        self.plans.append(plan)
        rows = [RowOutput(seq_id=r.seq_id, token_ids=[65] * r.num_samples) for r in plan.rows]
        return Ticket(StepOutput(step=plan.step, rows=rows))

    def check_health(self) -> None:
        if self.error is not None:
            raise self.error

    def shutdown(self) -> None:
        self.is_shut_down = True


def make_config(**cache: object) -> EngineConfig:
    return EngineConfig(
        model_config=ModelConfig(
            model="m", tokenizer="m", max_model_len=128, hf_config={"vocab_size": VOCAB}
        ),
        cache_config=CacheConfig(**{"num_gpu_blocks_override": 16, **cache}),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=64, max_num_seqs=8, max_model_len=128
        ),
    )


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def core(ranks: Ranks) -> EngineCore:
    made = EngineCore(make_config(), ranks)
    tokenizer = build_chain_tokenizer().backend_tokenizer.to_str()
    made.handle(SetTokenizer(json=tokenizer, eos_token_id=EOS))
    return made


def add(request_id: str, *, n: int = 1, max_tokens: int = 3, form: str | None = None) -> AddRequest:
    request = SequenceRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        sampling=RowSampling(),
        n=n,
        max_tokens=max_tokens,
        eos_token_id=EOS,
        needs_host_token=form is not None,
    )
    grammar = None if form is None else GrammarSpec(kind="regex", text=form)
    return AddRequest(request=request, grammar=grammar)


def run(core: EngineCore) -> list[EngineOutputs]:
    outputs, deadline = [], time.monotonic() + 10
    while core.has_work:
        assert time.monotonic() < deadline
        outputs.append(core.make_outputs(core.step()))
    return outputs


def tokens_of(outputs: list[EngineOutputs], request_id: str, branch: int = 0) -> list[int]:
    return [
        t
        for o in outputs
        for r in o.results
        if (r.request_id, r.branch) == (request_id, branch)
        for t in r.token_ids
    ]


def test_requests_run_to_their_end(core: EngineCore, ranks: Ranks) -> None:
    for i in range(3):
        core.handle(add(f"r{i}", max_tokens=2 + i))
    outputs = run(core)
    assert [tokens_of(outputs, f"r{i}") for i in range(3)] == [[65] * n for n in (2, 3, 4)]
    ends = {r.request_id: r.finish_reason for o in outputs for r in o.results if r.finish_reason}
    assert ends == {f"r{i}": FinishReason.LENGTH for i in range(3)}
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_steps == core.num_steps == len(ranks.plans)
    (group,) = stats.groups
    assert (group.num_total_blocks, group.num_used_blocks) == (16, 0)
    assert core.ready.num_gpu_blocks == 16
    assert core.ready.num_cache_tokens == 256


def test_refusals_are_failures_or_errors(core: EngineCore) -> None:
    core.add_now(add("r"))
    with pytest.raises(RequestError, match="already in use"):
        core.add_now(add("r"))
    core.handle(add("many", n=99))
    outputs = run(core)
    (failure,) = [f for o in outputs for f in o.failures]
    assert (failure.request_id, failure.param) == ("many", "n")
    assert tokens_of(outputs, "r") == [65] * 3, "the other one is served"


def test_forms_mask_the_rows_they_belong_to(core: EngineCore, ranks: Ranks) -> None:
    core.handle(add("free"))
    core.handle(add("formed", form="A{2}"))
    outputs = run(core)
    assert tokens_of(outputs, "free") == [65] * 3
    assert tokens_of(outputs, "formed") == [65] * 3
    assert len([p for p in ranks.plans if p.token_masks]) == 3
    masks = [int.from_bytes(m, "little") for p in ranks.plans for m in p.token_masks.values()]
    assert [{i for i in range(VOCAB) if m >> i & 1} for m in masks] == [{65}, {65}, {EOS}]
    assert not core._structured, "nothing is left of a request that has ended"


def test_branches_under_a_form(core: EngineCore) -> None:
    core.handle(add("r", n=3, form="A+", max_tokens=4))
    outputs = run(core)
    assert [tokens_of(outputs, "r", b) for b in range(3)] == [[65] * 4] * 3
    assert not core._structured


def test_a_wrong_form_fails_its_request(core: EngineCore) -> None:
    core.handle(add("r", form="["))
    core.handle(add("ok"))
    outputs = run(core)
    (failure,) = [f for o in outputs for f in o.failures]
    assert (failure.request_id, failure.param) == ("r", "guided_regex")
    assert tokens_of(outputs, "ok") == [65] * 3
    with pytest.raises(RequestError, match="guided_regex"):
        core.add_now(add("now", form="["))
    assert not core.has_work


def test_a_form_that_cannot_be_followed_fails_its_request(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.handle(add("ok"))
    core.add_now(add("r", form="A+"))
    core.make_outputs(core.step())

    def break_down(request_id: str, branch: int) -> bytes:
        raise RequestError("too complex")

    monkeypatch.setattr(core._structured, "next_mask", break_down)
    outputs = run(core)
    assert [f.message for o in outputs for f in o.failures] == ["too complex"]
    assert tokens_of(outputs, "r") == [], "nothing unmasked gets out"
    assert len(tokens_of(outputs, "ok")) == 2


def test_requests_are_aborted_while_their_form_is_compiled(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    never: Future = Future()
    monkeypatch.setattr(core._structured, "start_compile", lambda spec: never)
    core.handle(add("r", form="A"))
    assert core.has_work
    assert core.stats().num_waiting == 1
    assert core.step() == []
    core.handle(AbortRequests(request_ids=["r", "unknown"]))
    assert not core.has_work


def test_single_branches_end(core: EngineCore) -> None:
    core.handle(add("r", n=2, max_tokens=20))
    core.make_outputs(core.step())
    core.handle(EndBranches(branches=[("r", 0), ("gone", 1)]))
    outputs = run(core)
    assert tokens_of(outputs, "r", 0) == []
    assert len(tokens_of(outputs, "r", 1)) == 19


def test_a_core_that_cannot_be_made_leaves_no_rank_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(block_tokens=(32,))
    monkeypatch.setattr(core_module, "make_executor", lambda config: ranks)
    with pytest.raises(ConfigError, match=r"16.*32"):
        make_core(make_config())
    assert ranks.is_shut_down
    with pytest.raises(ConfigError, match="lower max_model_len"):
        EngineCore(make_config(num_gpu_blocks_override=2), Ranks())


def test_the_loop_reports_and_ends(core: EngineCore, ranks: Ranks) -> None:
    inbox, reports = QueueInbox(), []
    inbox.put(add("r", max_tokens=2))
    inbox.put(AbortRequests(request_ids=["unknown"]))

    def send(report) -> None:
        reports.append(report)
        if isinstance(report, EngineOutputs) and not core.has_work:
            inbox.put(Shutdown())

    CoreLoop(core, inbox, send).run()
    assert tokens_of(reports, "r") == [65, 65]
    assert reports[-1].stats.num_running == 0
    assert ranks.is_shut_down


@pytest.mark.parametrize("is_idle", [True, False])
def test_the_loop_says_why_it_failed(core: EngineCore, ranks: Ranks, is_idle: bool) -> None:
    inbox, reports = QueueInbox(), []
    if not is_idle:
        inbox.put(add("r"))
    ranks.error = EngineDeadError("rank 0 was killed")
    CoreLoop(core, inbox, reports.append).run()
    (failed,) = reports
    assert isinstance(failed, EngineFailed)
    assert (failed.kind, failed.message) == ("EngineDeadError", "rank 0 was killed")
    assert "Traceback" in failed.trace
    assert ranks.is_shut_down
