"""From the engine's log-probabilities to those of the two response formats.

Called by the serving classes for whole answers and for stream chunks. Values that are not finite
are clamped here, so that every body is valid JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from vllm.entrypoints.openai.response import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogProbs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from vllm.outputs import Logprob
from vllm.transformers_utils.detokenizer import TokenBytes

LOWEST_LOGPROB = -9999.0


def clamp_logprob(value: float) -> float:
    """Return a value that JSON can hold; minus infinity and NaN become -9999."""
    return max(value, LOWEST_LOGPROB) if math.isfinite(value) else LOWEST_LOGPROB


def render_prompt_logprobs(
    entries: Sequence[Mapping[int, Logprob] | None] | None,
) -> PromptLogprobs | None:
    """Return the `prompt_logprobs` member: token id -> value, rank and text, null at the first."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            token_id: PromptLogprob(
                logprob=clamp_logprob(it.logprob), rank=it.rank, decoded_token=it.decoded_token
            )
            for token_id, it in entry.items()
        }
        for entry in entries
    ]


class LogprobRenderer:
    """Renders log-probabilities for one tokenizer."""

    def __init__(self, token_bytes: TokenBytes | None, *, as_token_ids: bool) -> None:
        """Make a renderer.

        Args:
            token_bytes: None where the engine runs without a tokenizer.
            as_token_ids: write tokens as "token_id:N" (--return-tokens-as-token-ids).
        """
        self._token_bytes = token_bytes
        self._as_token_ids = as_token_ids or token_bytes is None

    def render_chat(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Mapping[int, Logprob]],
        num_top: int,
        *,
        skip_special_tokens: bool,
    ) -> ChatLogprobs:
        """Return one entry a token, each with its `num_top` likeliest candidates."""
        content = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            best = sorted(entry.items(), key=lambda pair: pair[1].logprob, reverse=True)[:num_top]
            content.append(
                ChatLogprob(
                    token=self._text(token_id, entry[token_id]),
                    logprob=clamp_logprob(entry[token_id].logprob),
                    bytes=self._bytes(token_id, entry[token_id], skip_special_tokens),
                    top_logprobs=[
                        TopLogprob(
                            token=self._text(i, it),
                            logprob=clamp_logprob(it.logprob),
                            bytes=self._bytes(i, it, skip_special_tokens),
                        )
                        for i, it in best
                    ],
                )
            )
        return ChatLogprobs(content=content)

    def render_completion(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Mapping[int, Logprob] | None],
        num_top: int,
        *,
        offset: int = 0,
        num_unseen: int = 0,
    ) -> tuple[CompletionLogProbs, int]:
        """Return the four lists, and the offset behind the last token.

        Args:
            token_ids: the chosen tokens.
            entries: None where nothing predicts the token (the first of a prompt).
            num_top: how many candidates beside the chosen token are reported.
            offset: characters of the choice that were sent before.
            num_unseen: leading tokens that are not part of the text (a BOS that the tokenizer
                added).
        """
        result = CompletionLogProbs()
        for position, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True)):
            text = self._plain_text(token_id, None if entry is None else entry[token_id])
            shown = f"token_id:{token_id}" if self._as_token_ids else text
            result.text_offset.append(offset)
            result.tokens.append(shown)
            if position >= num_unseen:
                offset += len(text)
            if entry is None:
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
                continue
            result.token_logprobs.append(clamp_logprob(entry[token_id].logprob))
            candidates: dict[str, float] = {}
            for i, it in list(entry.items())[: num_top + 1]:
                candidates.setdefault(self._text(i, it), clamp_logprob(it.logprob))
            result.top_logprobs.append(candidates)
        return result, offset

    def _text(self, token_id: int, entry: Logprob) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else entry.decoded_token or ""

    def _plain_text(self, token_id: int, entry: Logprob | None) -> str:
        if entry is not None:
            return entry.decoded_token or ""
        return "" if self._token_bytes is None else self._token_bytes.decode_one(token_id)

    def _bytes(self, token_id: int, entry: Logprob, skip_special_tokens: bool) -> list[int]:
        table = self._token_bytes
        if table is None or not table.is_exact:
            return list((entry.decoded_token or "").encode())
        if skip_special_tokens and token_id in table.special_ids:
            return []  # not part of the text, which these bytes add up to
        return list(table[token_id])
