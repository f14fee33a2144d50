"""Comparison of generated tokens with transformers, dense and without a cache.

One forward over prompt and output gives the reference's choice after every prefix, so that the
output is followed token by token at the price of one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.utils.paged_driver import Generated

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TIE = 1e-3
"""Two tokens count as equal where the reference's two best logits are this near."""


def make_prompts(lengths: Sequence[int] = (1, 7, 16, 17, 40, 64, 129, 200)) -> list[list[int]]:
    """Return random prompts of these lengths, ids 3..299."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Return the reference's logits at every position, [tokens, vocab]."""
    return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


def assert_follows(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    made: Sequence[Generated],
    *,
    atol: float = 1e-4,
) -> None:
    """Check that outputs are what the reference generates greedily, with logits within `atol`."""
    for prompt, output in zip(prompts, made, strict=True):
        expected = reference_logits(model, [*prompt, *output.token_ids[:-1]])[len(prompt) - 1 :]
        torch.testing.assert_close(torch.stack(output.logits), expected, rtol=0, atol=atol)
        best = expected.topk(2).values
        for step, token in enumerate(output.token_ids):
            is_best = token == int(expected[step].argmax())
            gap = (best[step, 0] - best[step, 1]).item()
            assert is_best or gap <= TIE, f"prompt of {len(prompt)}, step {step}, gap {gap}"
