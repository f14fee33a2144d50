"""A beam search through an asynchronous engine: each beam of each step is a one-token request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from vllm.beam_search import BeamSearchInstance, BeamSearchSequence
from vllm.errors import RequestError
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Generate = Callable[[Any, SamplingParams, str], AsyncGenerator[RequestOutput, None]]


def make_step_params(params: BeamSearchParams, max_logprobs: int) -> SamplingParams:
    """Return what one step of a beam asks for.

    Raises: RequestError if the beam is wider than the engine's log-probabilities allow.
    """
    if 2 * params.beam_width > max_logprobs:
        raise RequestError(
            f"beam_width may be at most {max_logprobs // 2}, half of max_logprobs, got "
            f"{params.beam_width}; start the engine with --max-logprobs {2 * params.beam_width}",
            param="beam_width",
        )
    return SamplingParams(
        logprobs=2 * params.beam_width,
        max_tokens=1,
        temperature=params.temperature,
        ignore_eos=True,  # the search itself decides what an end means
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def candidates_of(output: RequestOutput, params: BeamSearchParams) -> dict[int, Logprob]:
    """Return the likeliest next tokens that a step of one beam found, lower ids first among equals.

    The token that the step has drawn is left out unless it is one of them: a search is no lottery.
    """
    logprobs = output.outputs[0].logprobs
    assert logprobs, "a step asks for log-probabilities"
    ranked = sorted(logprobs[0].items(), key=lambda item: (-item[1].logprob, item[0]))
    return dict(ranked[: 2 * params.beam_width])


def continuation_text(
    tokenizer: PreTrainedTokenizerBase, beam: BeamSearchSequence, num_prompt_tokens: int
) -> str:
    """Return the text of a beam behind its prompt, without special tokens."""
    text = tokenizer.decode(beam.tokens[num_prompt_tokens:], skip_special_tokens=True)
    assert isinstance(text, str), "one sequence decodes to one text"
    return text


async def run_beam_search(
    generate: Generate,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | None,
    prompt_token_ids: list[int],
    request_id: str,
    params: BeamSearchParams,
    *,
    step_params: SamplingParams,
    max_model_len: int,
) -> RequestOutput:
    """Return the best beams of a prompt as the answers of one finished output.

    Args:
        generate: runs one request of the engine.
        tokenizer: makes the text and names the end token.
        prompt: its text, if it was given as text.
        prompt_token_ids: its ids.
        request_id: of the search; its steps get ids of their own.
        params: of the search.
        step_params: from `make_step_params`.
        max_model_len: where every beam ends.
    """
    search = BeamSearchInstance.from_prompt(prompt_token_ids)
    eos_id: Any = tokenizer.eos_token_id

    async def grow(beam: BeamSearchSequence, name: str) -> dict[int, Logprob]:
        found: dict[int, Logprob] = {}
        step = TokensPrompt(prompt_token_ids=beam.tokens)
        async for output in generate(step, step_params, name):
            found = candidates_of(output, params)
        return found

    for step in range(min(params.max_tokens, max_model_len - len(prompt_token_ids))):
        if not search.beams:
            break
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(grow(beam, f"beam_search-{request_id}-{step}-{i}"))
                for i, beam in enumerate(search.beams)
            ]
        search.advance([task.result() for task in running], params, eos_id)
    best = search.best(params, eos_id)
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(
                index=i,
                text=continuation_text(tokenizer, beam, len(prompt_token_ids)),
                token_ids=beam.tokens,
                cumulative_logprob=beam.cum_logprob,
                finish_reason=beam.finish_reason,
            )
            for i, beam in enumerate(best)
        ],
        finished=True,
    )
