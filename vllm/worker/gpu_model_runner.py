"""One step on one GPU: everything is queued when `submit` returns, nothing is waited for.

The worker calls `submit` and, later, `wait` on what it got; up to two steps are on their way. The
tokens that a step chooses stay on the device, where the next one finds them. As the CPU's runner,
it knows no requests and no owners of blocks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.attention.backends.paged_attn import PagedAttention
from vllm.batch import ForwardBatch
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.sampler import PendingSamples, Sampler, SampleRequest
from vllm.model_executor.models.interfaces import TextModel
from vllm.step import StepOutput, StepPlan
from vllm.worker.cache_engine import CacheEngine
from vllm.worker.cuda_graph import StepGraphs, list_graph_sizes
from vllm.worker.cut_batch import NO_CUTS, CutPoints
from vllm.worker.gpu_input_batch import GpuInputBatch
from vllm.worker.input_batch import BatchRow, StepInput
from vllm.worker.model_runner import list_group_kernels, make_outputs
from vllm.worker.pending_step import FinishedStep, PendingStep
from vllm.worker.prompt_logprobs import PendingPromptLogprobs, launch_prompt_logprobs
from vllm.worker.prompt_size import PromptSize, list_prompt_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """The most of everything that a runner prepares for.

    Attributes:
        has_graphs: whether padded steps are captured.
        pads_decodes: whether decode steps are padded to a few sizes.
        pads_prompts: whether small steps with prompts are.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    has_graphs: bool
    pads_decodes: bool = True
    pads_prompts: bool = True


class GpuModelRunner:
    """Queues plans on a loaded model.

    Args:
        cache: this rank's cache.
        kernels: kernel of each attention layer.
        cuts: see InputBatch.
    """

    def __init__(
        self,
        model: TextModel,
        cache: CacheEngine,
        kernels: Mapping[int, str],
        tp: TensorParallel,
        *,
        limits: RunnerLimits,
        device: torch.device,
        cuts: CutPoints = NO_CUTS,
    ) -> None:
        self._model = model
        self._cache = cache
        self._tp = tp
        self._sampler = Sampler()
        self._kernels = list_group_kernels(cache, kernels)
        decode_sizes = list_graph_sizes(limits.max_num_seqs) if limits.pads_decodes else ()
        self.prompt_sizes: tuple[PromptSize, ...] = ()
        if limits.pads_prompts:
            self.prompt_sizes = list_prompt_sizes(
                limits.max_num_seqs, limits.max_num_batched_tokens
            )
        self._input_batch = GpuInputBatch(
            limits.max_num_seqs,
            limits.max_model_len,
            limits.max_num_batched_tokens,
            cache.geometries,
            device,
            decode_sizes=decode_sizes,
            prompt_sizes=self.prompt_sizes,
            cuts=cuts,
        )
        self._has_graphs = limits.has_graphs
        self._decodes = StepGraphs(self.run_decode, decode_sizes, "decode steps")
        self._prompts = StepGraphs(self.run_prompts, self.prompt_sizes, "steps with prompts")

    @property
    def num_graphs(self) -> int:
        """Graphs that there are, or will be."""
        return len(self._decodes.sizes) + len(self._prompts.sizes) if self._has_graphs else 0

    @torch.inference_mode()
    def capture(self, *, only_largest: bool = False) -> None:
        """Capture the graphs, or of each kind the largest alone, for measuring."""
        if not self._has_graphs:
            return
        pool = torch.cuda.graph_pool_handle()
        self._prompts.capture(pool, only_largest=only_largest)
        self._decodes.capture(pool, only_largest=only_largest)

    def run_decode(self, num_rows: int) -> Tensor:
        """Queue a decode step of the rows in the input batch's columns; [rows, E]."""
        self._input_batch.prepare_decode(num_rows)
        return self.run_forward(self._input_batch.view_decode(num_rows))

    def run_prompts(self, size: PromptSize) -> Tensor:
        """Queue the padded step with prompts that was sent last; [rows of the size, E]."""
        self._input_batch.prepare_prompts(size)
        return self.run_forward(self._input_batch.view_prompts(size))

    def run_forward(self, batch: ForwardBatch) -> Tensor:
        """Queue one forward pass; [T, E]."""
        attention = PagedAttention.prepare(batch, self._kernels, self._cache.caches)
        return self._model.forward(batch, attention)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Queue one step; outputs come in the order of the plan's rows."""
        started_s = time.perf_counter()
        self._cache.prepare_step(plan)
        step = self._input_batch.apply(plan)
        if step is None:
            return FinishedStep(StepOutput(step=plan.step, rows=[]))
        hidden_TE = self._run_step(step)
        prompt_logprobs = launch_prompt_logprobs(
            step, hidden_TE, self._model.compute_logits, self._input_batch
        )
        rows = [step.rows[i] for i in step.sampled]
        positions = [row.num_tokens for row in rows]
        samples = self._sample(step, hidden_TE, plan.token_masks) if rows else None
        return GpuPendingStep(
            step=step,
            number=plan.step,
            input_batch=self._input_batch,
            sampled=rows,
            positions=positions,
            samples=samples,
            prompt_logprobs=prompt_logprobs,
            done=torch.cuda.current_stream().record_event(),
            started_s=started_s,
        )

    def _run_step(self, step: StepInput) -> Tensor:
        if step.is_decode:
            return self._decodes.run(len(step.batch.input_ids))
        size = self._input_batch.prompt_size
        return self.run_forward(step.batch) if size is None else self._prompts.run(size)

    def _sample(
        self, step: StepInput, hidden_TE: Tensor, token_masks: Mapping[int, bytes]
    ) -> PendingSamples:
        """Queue the choice of the tokens; the rows go on with them on the device."""
        num_sampled = len(step.sampled)
        if not step.is_decode and step.batch.kept_rows is None:
            hidden_TE = hidden_TE[step.batch.logits_rows]
        logits_LV = self._model.compute_logits(hidden_TE[:num_sampled])  # padding comes last
        rows = [step.rows[i] for i in step.sampled]
        requests = [
            SampleRequest(
                row.state,
                step.plan_rows[i].num_samples,
                token_masks.get(step.plan_rows[i].seq_id),
                num_outputs=row.num_tokens - row.num_prompt_tokens,
            )
            for i, row in zip(step.sampled, rows, strict=True)
        ]
        samples = self._sampler.start(logits_LV, requests)
        next_ids = samples.next_ids
        if self._tp.size > 1:  # every rank has the logits, but only one choice may count
            next_ids = self._tp.broadcast(next_ids.clone())
        self._input_batch.advance(rows, next_ids)
        return samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GpuPendingStep:
    """A step on its way; see PendingStep.

    Attributes:
        sampled: rows that get a token, in sampling order.
        positions: where each of those tokens stands in its sequence.
        samples: what was chosen for them, None where no row is sampled.
        done: recorded behind everything that the step queued.
    """

    step: StepInput
    number: int
    input_batch: GpuInputBatch
    sampled: list[BatchRow]
    positions: list[int]
    samples: PendingSamples | None
    prompt_logprobs: PendingPromptLogprobs
    done: torch.cuda.Event
    started_s: float

    def synchronize(self) -> None:
        """See PendingStep."""
        self.done.synchronize()

    def wait(self) -> StepOutput:
        """See PendingStep."""
        results = self.samples.wait() if self.samples is not None else []
        ids = [r.token_ids[0] if r.token_ids else -1 for r in results]
        self.input_batch.settle(self.sampled, self.positions, ids)
        return StepOutput(
            step=self.number,
            rows=make_outputs(self.step, results, self.prompt_logprobs.wait()),
            forward_ms=(time.perf_counter() - self.started_s) * 1e3,
        )
