"""One answer of a request on the caller's side: its ids, text, log-probabilities and end.

Finds stop strings, and holds back exactly the text that may still become one. Used by
`engine/open_request.py`; knows no other answer and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.outputs import CompletionOutput, Logprob, SampleLogprobs
from vllm.sampling_params import SamplingParams
from vllm.sequence import SequenceResult
from vllm.step import TokenLogprobs
from vllm.transformers_utils.detokenizer import Detokenizer, TokenBytes
from vllm.types import FinishReason


class StopStrings:
    """Looks for stop strings in a text that arrives in pieces.

    Attributes:
        window: the end of the text that may be the beginning of a stop string.
    """

    __slots__ = ("_stops", "window")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self.window = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Take new text.

        Returns: (text that stood in the window and is decided now, None), with what is undecided
            left in the window; or (the whole window up to the match, the matched string), with the
            match and what follows left in the window. Of several matches the one that starts first
            counts.
        """
        text = self.window + piece
        best: tuple[int, str] | None = None
        for stop in self._stops:
            position = text.find(stop)
            if position >= 0 and (best is None or position < best[0]):
                best = (position, stop)
        if best is not None:
            self.window = text[best[0] :]
            return text[: best[0]], best[1]
        held = self._num_held(text)
        self.window = text[len(text) - held :]
        return text[: len(text) - held], None

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class Answer:
    """One of the n (or best_of) branches of a request.

    Attributes:
        token_ids: every generated id, never trimmed: an end token or the tokens of a cut stop
            string stay in.
        finish_reason: None while it runs.
    """

    __slots__ = (
        "_detokenizer", "_end_ids", "_logprobs", "_min_tokens", "_num_sent_tokens", "_pieces",
        "_stops", "_table", "cumulative_logprob", "finish_reason", "includes_stop", "index",
        "keeps_logprobs", "stop_reason", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        *,
        end_ids: frozenset[int],
        detokenizer: Detokenizer | None,
        table: TokenBytes | None,
    ) -> None:
        """Start empty.

        Args:
            index: position among the branches.
            params: of the request.
            end_ids: tokens that end the answer, so that their text is left out at the end.
            detokenizer: None when no text is made.
            table: to name tokens in log-probabilities; None without a tokenizer.
        """
        self.index = index
        self.token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.keeps_logprobs = params.logprobs is not None
        self.includes_stop = params.include_stop_str_in_output
        self._detokenizer = detokenizer
        self._table = table
        self._end_ids = end_ids
        stops = params.stop if detokenizer is not None else None
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = params.min_tokens
        self._logprobs: SampleLogprobs = []
        self._pieces: list[str] = []
        self._num_sent_tokens = 0

    @property
    def has_ended(self) -> bool:
        """Whether nothing can follow."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The text that is decided."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def apply(self, result: SequenceResult) -> bool:
        """Take what a step brought; the answer must not have ended.

        A stop string ends the answer here; tokens behind the one that completed it are dropped.

        Returns: whether that happened while the engine side still runs the answer.
        """
        if self._stops is None:
            self._add_all(result)
        else:
            for position in range(len(result.token_ids)):
                self._add_one(result, position)
                if self.has_ended:
                    return result.finish_reason is None
        if result.finish_reason is not None:
            self.end(result.finish_reason, result.stop_reason)
        return False

    def end(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the answer; text that was held back is given out."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        if self._stops is not None and not self.includes_stop and self._stops.window:
            self._pieces.append(self._stops.window)

    def _add_all(self, result: SequenceResult) -> None:
        ids = result.token_ids
        if result.logprobs is not None:
            for entry in result.logprobs:
                self._add_logprobs(entry)
        self.token_ids += ids
        if self._detokenizer is not None:
            shown = ids[:-1] if self._hides_last(result) else ids
            if text := self._detokenizer.push(shown):
                self._pieces.append(text)

    def _add_one(self, result: SequenceResult, position: int) -> None:
        assert self._stops is not None and self._detokenizer is not None
        if result.logprobs is not None:
            self._add_logprobs(result.logprobs[position])
        token_id = result.token_ids[position]
        self.token_ids.append(token_id)
        is_last = position == len(result.token_ids) - 1
        if is_last and self._hides_last(result):
            return
        piece = self._detokenizer.push([token_id])
        if not piece:
            return
        if len(self.token_ids) < self._min_tokens:
            self._pieces.append(piece)
            return
        self._watch(piece)

    def _watch(self, piece: str) -> None:
        stops = self._stops
        assert stops is not None
        num_known = len(stops.window)
        text, match = stops.push(piece)
        if self.includes_stop:  # nothing is held back: the window only remembers
            text += stops.window if match is None else match
            text = text[num_known:]
        if text:
            self._pieces.append(text)
        if match is not None:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = match

    def _hides_last(self, result: SequenceResult) -> bool:
        """Whether the last token ended the answer as a token, so that its text is left out."""
        return (
            result.finish_reason is FinishReason.STOP
            and not self.includes_stop
            and bool(result.token_ids)
            and result.token_ids[-1] in self._end_ids
        )

    def _add_logprobs(self, entry: TokenLogprobs) -> None:
        self.cumulative_logprob += entry.logprobs[0]
        if self.keeps_logprobs:
            pending = b"" if self._detokenizer is None else self._detokenizer.pending
            self._logprobs.append(make_logprobs(entry, self._table, pending))

    def make_output(self, *, shows_logprob: bool) -> CompletionOutput:
        """Return everything so far.

        Args:
            shows_logprob: whether log-probabilities were asked for.
        """
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob if shows_logprob else None,
            logprobs=list(self._logprobs) if shows_logprob else None,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
        )

    def take_delta(self, *, shows_logprob: bool) -> CompletionOutput:
        """Return what is new since the last call, and forget its text.

        Args:
            shows_logprob: whether log-probabilities were asked for.
        """
        text = "".join(self._pieces)
        self._pieces.clear()
        ids = self.token_ids[self._num_sent_tokens :]
        self._num_sent_tokens = len(self.token_ids)
        logprobs: SampleLogprobs | None = None
        if shows_logprob:
            logprobs, self._logprobs = self._logprobs, []
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=ids,
            cumulative_logprob=self.cumulative_logprob if shows_logprob else None,
            logprobs=logprobs,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
        )


def make_logprobs(
    entry: TokenLogprobs, table: TokenBytes | None, pending: bytes = b""
) -> dict[int, Logprob]:
    """Return the log-probabilities of one position by token, the chosen token first.

    Args:
        entry: as it came from the workers.
        table: names the tokens; None leaves them unnamed.
        pending: bytes of an unfinished character before this position.
    """
    found: dict[int, Logprob] = {}
    for place, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        if token_id in found:
            continue  # the chosen token is named again among the likeliest
        found[token_id] = Logprob(
            logprob=logprob,
            rank=entry.rank if place == 0 else place,
            decoded_token=None if table is None else table.decode_one(token_id, pending),
        )
    return found
