"""Beam search over several prompts at once, on the offline class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.beam_search import BeamSearchInstance, BeamSearchOutput
from vllm.engine.async_beam_search import candidates_of, make_step_params
from vllm.inputs import TokensPrompt
from vllm.sampling_params import BeamSearchParams

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM


def search_beams(
    llm: LLM, prompts: Sequence[str | list[int]], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """Run one search for each prompt; every step grows all beams of all prompts in one batch.

    Raises:
        RequestError: a prompt or the width cannot be served.
        TypeError: something that is no prompt or no params.
    """
    if not isinstance(params, BeamSearchParams):
        raise TypeError(f"params must be BeamSearchParams, got {type(params).__name__}")
    if wrong := next((p for p in prompts if not isinstance(p, (str, Sequence))), None):
        raise TypeError(f"a prompt must be text or a list of token ids, got {wrong!r}")
    tokenizer = llm.get_tokenizer()
    model = llm.llm_engine.model_config
    step_params = make_step_params(params, model.max_logprobs)
    eos_id = tokenizer.eos_token_id
    ids = [tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
    searches = [BeamSearchInstance.from_prompt(one) for one in ids]
    for step in range(params.max_tokens):
        live = [
            search
            for search, prompt in zip(searches, ids, strict=True)
            if search.beams and len(prompt) + step < model.max_model_len
        ]
        if not live:
            break
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=beam.tokens) for s in live for beam in s.beams],
            step_params,
            use_tqdm=False,
        )
        found = iter([candidates_of(output, params) for output in outputs])
        for search in live:
            search.advance([next(found) for _ in search.beams], params, eos_id)
    results = []
    for search in searches:
        best = search.best(params, eos_id)
        for beam in best:
            text = tokenizer.decode(beam.tokens, skip_special_tokens=True)
            beam.text = text if isinstance(text, str) else None
        results.append(BeamSearchOutput(sequences=best))
    return results
