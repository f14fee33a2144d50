"""One step on one rank, in five calls: input, plan, forward, logits, sample.

The worker calls `execute`; nothing here knows requests, owners of blocks or other steps. On several
ranks rank 0 chooses the tokens and tells the others, so that the rows of all ranks stay alike.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from vllm.attention.backends.paged_attn import PagedAttention
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.sampler import Sampler, SampleRequest, SampleResult
from vllm.model_executor.models.interfaces import TextModel
from vllm.step import RowOutput, StepOutput, StepPlan
from vllm.worker.cache_engine import CacheEngine
from vllm.worker.cut_batch import NO_CUTS, CutPoints
from vllm.worker.input_batch import InputBatch, StepInput
from vllm.worker.pending_step import FinishedStep, PendingStep
from vllm.worker.prompt_logprobs import PromptLogprobs, collect_prompt_logprobs


class ModelRunner:
    """Runs plans on a loaded model.

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
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        cuts: CutPoints = NO_CUTS,
    ) -> None:
        self._model = model
        self._cache = cache
        self._tp = tp
        self._device = device
        self._sampler = Sampler()
        self._input_batch = InputBatch(max_num_seqs, max_model_len, cache.geometries, device, cuts)
        self._kernels = list_group_kernels(cache, kernels)

    def submit(self, plan: StepPlan) -> PendingStep:
        """Run one step, which is through when this returns."""
        return FinishedStep(self.execute(plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step; outputs come in the order of the plan's rows."""
        started_s = time.perf_counter()
        self._cache.prepare_step(plan)
        step = self._input_batch.apply(plan)
        if step is None:
            return StepOutput(step=plan.step, rows=[])
        attention = PagedAttention.prepare(step.batch, self._kernels, self._cache.caches)
        hidden_TE = self._model.forward(step.batch, attention)
        prompt_logprobs = collect_prompt_logprobs(
            step, hidden_TE, self._model.compute_logits, self._input_batch
        )
        results = self._sample(step, hidden_TE, plan.token_masks)
        return StepOutput(
            step=plan.step,
            rows=make_outputs(step, results, prompt_logprobs),
            forward_ms=(time.perf_counter() - started_s) * 1e3,
        )

    def _sample(
        self, step: StepInput, hidden_TE: Tensor, token_masks: Mapping[int, bytes]
    ) -> list[SampleResult]:
        """Choose the tokens of the sampled rows and append them to the rows."""
        if not step.sampled:
            return []
        logits_rows = step.batch.logits_rows
        if len(logits_rows) != len(hidden_TE):  # ascending, so equal lengths mean every token
            hidden_TE = hidden_TE[logits_rows]
        logits_LV = self._model.compute_logits(hidden_TE)
        results: list[SampleResult] = []
        if self._tp.rank == 0:
            requests = [
                SampleRequest(
                    step.rows[i].state,
                    step.plan_rows[i].num_samples,
                    token_masks.get(step.plan_rows[i].seq_id),
                    num_outputs=step.rows[i].state.num_outputs,
                )
                for i in step.sampled
            ]
            results = self._sampler(logits_LV, requests)
        tokens = self._agree(results, len(step.sampled))
        self._input_batch.append_tokens([step.rows[i] for i in step.sampled], tokens)
        return results

    def _agree(self, results: list[SampleResult], num_rows: int) -> list[int]:
        """Return the token that each sampled row goes on with (its first sample), -1 for an error.

        Rows that fork go on as branch 0; the other branches enter as new rows with their own
        tokens.
        """
        tokens = [r.token_ids[0] if r.token_ids else -1 for r in results]
        if self._tp.size == 1:
            return tokens
        ids = torch.tensor(tokens or [0] * num_rows, dtype=torch.int64, device=self._device)
        return self._tp.broadcast(ids).tolist()


def list_group_kernels(cache: CacheEngine, kernels: Mapping[int, str]) -> list[tuple[int, str]]:
    """Return every (group, kernel) that some layer uses, sorted.

    Args:
        cache: which group each layer's views belong to.
        kernels: kernel of each attention layer.
    """
    views = ((cache.caches[layer], kernel) for layer, kernel in kernels.items())
    return sorted({(view.group, kernel) for view, kernel in views if view is not None})


def make_outputs(
    step: StepInput, results: list[SampleResult], prompt_logprobs: Mapping[int, PromptLogprobs]
) -> list[RowOutput]:
    """Put results back into the order of the plan."""
    if step.order is None and len(results) == len(step.rows) and not prompt_logprobs:
        return [
            RowOutput(
                seq_id=row.seq_id,
                token_ids=result.token_ids,
                logprobs=result.logprobs,
                error=result.error,
            )
            for row, result in zip(step.plan_rows, results, strict=True)
        ]
    by_index = dict(zip(step.sampled, results, strict=False))
    outputs = []
    for index, row in enumerate(step.plan_rows):
        result = by_index.get(index)
        prompt = prompt_logprobs.get(index)
        outputs.append(
            RowOutput(
                seq_id=row.seq_id,
                token_ids=result.token_ids if result else [],
                logprobs=result.logprobs if result else None,
                prompt_logprobs=prompt.entries if prompt else None,
                prompt_start=prompt.start if prompt else 0,
                error=result.error if result else None,
            )
        )
    if step.order is None:
        return outputs
    ordered = dict(zip(step.order, outputs, strict=True))
    return [ordered[i] for i in range(len(outputs))]
