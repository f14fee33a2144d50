"""What the host of a GPU engine does: its start phase by phase, and a prompt's Python by function.

Loads one shape with made-up weights, answers one short prompt, and says how long each phase took
and which kernels were compiled. Then runs prompts one after the other: by their graphs, kernel by
kernel, and without the padding of graphs; at last by graphs again, with Python's profiler.

    python benchmarks/engine/gpu_host.py qwen3-next-small --prompts 20 --top 25 --compare

For a cold start point TRITON_CACHE_DIR at an empty folder. A prompt's host time is that of the
runner's `submit`, which queues the step; its wall time has the kernels, too.
"""

from __future__ import annotations

import time

_STARTED_S = time.perf_counter()  # before the imports, which are a phase

import argparse  # noqa: E402
import cProfile  # noqa: E402
import io  # noqa: E402
import logging  # noqa: E402
import pstats  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import triton  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.engine.gpu_offline import PLANS  # noqa: E402
from benchmarks.engine.shapes import SHAPES, write_shape  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402
from vllm.outputs import RequestOutput  # noqa: E402
from vllm.worker.gpu_model_runner import GpuModelRunner  # noqa: E402
from vllm.worker.memory import GIB  # noqa: E402

FORMS = ("graphs", "kernel by kernel", "no padding")


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt")
    parser.add_argument("--top", type=int, default=25, help="functions that are shown")
    parser.add_argument("--events", action="store_true", help="show every compiled kernel")
    parser.add_argument("--compare", action="store_true", help="compare the forms of prompts")
    parser.add_argument("--profile-start", action="store_true", help="show the start by function")
    return parser.parse_args()


class Watch:
    """Notes log lines, compilations and launchers' builds with their times since the start."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str]] = []
        self.compiled: list[tuple[float, float, str]] = []
        self.num_found = 0
        self.builds: list[tuple[float, float]] = []
        self._watch_compiler()
        self._watch_builds()
        handler = logging.Handler()
        handler.emit = lambda record: self.note(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("vllm").addHandler(handler)

    def note(self, text: str) -> None:
        """Write down what has happened."""
        self.lines.append((time.perf_counter() - _STARTED_S, text))

    def report(self, *, shows_events: bool) -> None:
        """Print the phases, and what was compiled between them."""
        for at_s, text in self.lines:
            since = [c for c in self.compiled if c[0] <= at_s]
            builds = [b for b in self.builds if b[0] <= at_s]
            print(
                f"{at_s:7.2f} s  {len(since):3} kernels compiled in {sum(c[1] for c in since):6.2f}"
                f" s, {len(builds):2} launchers in {sum(b[1] for b in builds):5.2f} s  {text[:90]}"
            )
        print(f"{self.num_found} kernels came out of the cache")
        if shows_events:
            for at_s, took_s, name in self.compiled:
                print(f"  {at_s:7.2f} s  {took_s:6.2f} s  {name}")

    def _watch_compiler(self) -> None:
        def listen(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
            if cache_hit:
                self.num_found += 1
                return
            took_s = times.total / 1e6
            self.compiled.append((time.perf_counter() - _STARTED_S, took_s, src.name))

        triton.knobs.compilation.listener = listen

    def _watch_builds(self) -> None:
        from triton.backends.nvidia import driver

        build = driver.compile_module_from_src

        def timed(*args: Any, **options: Any) -> Any:
            started_s = time.perf_counter()
            module = build(*args, **options)
            ended_s = time.perf_counter()
            self.builds.append((ended_s - _STARTED_S, ended_s - started_s))
            return module

        driver.compile_module_from_src = timed


def measure_parts() -> None:
    """Print what single calls cost on this host."""
    from vllm._custom_ops.batch import prepare_decode_tokens
    from vllm._custom_ops.norm import rms_norm
    from vllm._custom_ops.triton.batch import _tokens_kernel

    x = torch.zeros(8, 64, dtype=torch.bfloat16, device="cuda")
    out, weight = torch.empty_like(x), x[0].clone()
    columns = torch.zeros(3, 8, dtype=torch.int64, device="cuda")
    ids, positions, last = torch.zeros(3, 8, dtype=torch.int64, device="cuda")
    lens = torch.zeros(8, dtype=torch.int32, device="cuda")
    arguments = (ids, positions, lens, *columns, last)
    launch = {"BLOCK": 128, "OVERLAPS": False, "launch_pdl": False}
    calls: dict[str, Callable[[], Any]] = {
        "empty": lambda: torch.empty(8, 64, device="cuda"),
        "add": lambda: x + x,
        "linear": lambda: torch.nn.functional.linear(x, x),
        "C++ op": lambda: rms_norm(out, x, weight, 1e-6),
        "Triton op": lambda: prepare_decode_tokens(*arguments),
        "Triton's own launch": lambda: _tokens_kernel.jit[(1,)](*arguments, 8, 1, **launch),
        "our launch": lambda: _tokens_kernel[(1,)](*arguments, 8, 1, **launch),
        "current device": torch.cuda.current_device,
        "100 additions": lambda: sum(range(100)),
    }
    found = []
    with torch.inference_mode():
        for name, call in calls.items():
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            for _ in range(500):
                call()
            found.append(f"{name} {(time.perf_counter() - started_s) * 2e3:.1f}")
            torch.cuda.synchronize()
    print("us a call:", ", ".join(found))


def show(profiler: cProfile.Profile, top: int) -> None:
    """Print the functions that took longest by themselves."""
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(top)
    print("\n".join(line[:150] for line in text.getvalue().splitlines() if line.strip()))


def time_submits() -> tuple[list[float], list[GpuModelRunner]]:
    """Return a list that gets the seconds of every step's `submit`, and one with its runner."""
    submits: list[float] = []
    runners: list[GpuModelRunner] = []
    submit, capture = GpuModelRunner.submit, GpuModelRunner.capture

    def timed(self: GpuModelRunner, plan: Any) -> Any:
        started_s = time.perf_counter()
        pending = submit(self, plan)
        submits.append(time.perf_counter() - started_s)
        runners[:] = [self]
        return pending

    def weighed(self: GpuModelRunner, *, only_largest: bool = False) -> None:
        before, _ = torch.cuda.mem_get_info()
        capture(self, only_largest=only_largest)
        torch.cuda.synchronize()
        after, _ = torch.cuda.mem_get_info()
        which = "largest graphs" if only_largest else f"all {self.num_graphs} graphs"
        print(f"{which} took {(before - after) / GIB:.3f} GiB of the device")

    GpuModelRunner.submit = timed  # type: ignore[method-assign]
    GpuModelRunner.capture = weighed  # type: ignore[method-assign]
    return submits, runners


@contextmanager
def run_by(form: str, runner: GpuModelRunner) -> Iterator[None]:
    """Run steps with prompts by their graphs, kernel by kernel, or without padding."""
    graphs, batch = runner._prompts._graphs, runner._input_batch
    sizes = batch._prompt_sizes
    if form != "graphs":
        runner._prompts._graphs = {}
    if form == "no padding":
        batch._prompt_sizes = ()
    try:
        yield
    finally:
        runner._prompts._graphs = graphs
        batch._prompt_sizes = sizes


def compare_forms(llm: LLM, runner: GpuModelRunner, vocab: int) -> None:
    """Print how far answers by graphs agree with those of the same steps kernel by kernel."""
    rng = random.Random(1)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)
    params.detokenize = False
    for lens in ([13], [512], [100, 300], [700], [13] * 30, [*range(5, 200, 9)]):
        prompts = [
            TokensPrompt(prompt_token_ids=[rng.randrange(10, vocab - 10) for _ in range(n)])
            for n in lens
        ]
        answers: list[list[list[Any]]] = []
        for form in FORMS:
            with run_by(form, runner):
                outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([read_answer(output) for output in outputs])
        same = [sum(a == b for a, b in zip(answers[0], other, strict=True)) for other in answers]
        print(
            f"prompts {str(lens)[:40]}: of {len(lens)} have the same logprobs kernel by kernel "
            f"{same[1]}, without padding {same[2]}"
        )


def read_answer(output: RequestOutput) -> list[Any]:
    """Return the tokens of an answer and their logprobs."""
    best = output.outputs[0]
    assert best.logprobs is not None
    return [list(best.token_ids), [{i: e.logprob for i, e in d.items()} for d in best.logprobs]]


def make_engine(shape: str, folder: Path) -> LLM:
    """Return the engine of `gpu_offline.py`."""
    return LLM(
        str(write_shape(shape, folder)),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=PLANS[shape].max_model_len,
        gpu_memory_utilization=PLANS[shape].memory,
        max_num_seqs=256,
        enable_prefix_caching=False,
    )


def measure_prompts(
    args: argparse.Namespace, answer: Callable[[int], float], submits: list[float], form: str
) -> None:
    """Print what a prompt takes, and the host's part of it."""
    answer(args.tokens)
    submits.clear()
    walls = [answer(args.tokens) for _ in range(args.prompts)]
    print(
        f"{args.shape}, {form}: a prompt of {args.tokens} tokens takes "
        f"{statistics.median(walls) * 1e3:.2f} ms, its submit "
        f"{statistics.median(submits) * 1e3:.2f} ms (least {min(submits) * 1e3:.2f})"
    )


def main() -> int:
    """Start, measure and print."""
    watch = Watch()
    args = parse_args()
    watch.note("imported")
    vocab = SHAPES[args.shape]["vocab_size"]
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    params.detokenize = False
    submits, runners = time_submits()
    profiler = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        if args.profile_start:
            profiler.enable()
        llm = make_engine(args.shape, Path(folder))
        profiler.disable()
        watch.note("engine is ready")

        def answer(num_tokens: int) -> float:
            ids = [rng.randrange(10, vocab - 10) for _ in range(num_tokens)]
            prompt = TokensPrompt(prompt_token_ids=ids)
            started_s = time.perf_counter()
            llm.generate([prompt], params, use_tqdm=False)
            return time.perf_counter() - started_s

        answer(20)
        watch.note("first answer")
        answer(args.tokens)
        watch.note(f"first answer to {args.tokens} tokens")
        watch.report(shows_events=args.events)
        if args.profile_start:
            show(profiler, args.top)
        measure_parts()
        for form in FORMS:
            with run_by(form, runners[0]):
                measure_prompts(args, answer, submits, form)
        if args.compare:
            compare_forms(llm, runners[0], vocab)
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(args.prompts):
            answer(args.tokens)
        profiler.disable()
    show(profiler, args.top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
