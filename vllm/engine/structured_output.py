"""Structured output: which tokens a form allows next.

Compiles JSON schemas, regular expressions, choices and grammars with llguidance, follows each
answer token by token and gives the workers a bitmask of allowed ids for each row. Runs on the
engine side (`engine/core.py`); compiling happens in a thread of its own, so that no step waits for
it. No torch.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from vllm.engine.messages import GrammarSpec, SetTokenizer
from vllm.errors import RequestError
from vllm.sequence import SequenceResult

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_CACHED_GRAMMARS = 64
# One space, or a line break and an indentation: endless white space is a way to say nothing.
_JSON_WHITESPACE = r"[ ]?|\r?\n[ \t]{0,40}"
_ANY_JSON_OBJECT = '{"type": "object"}'


class GrammarCompiler:
    """Turns forms into matchers for one tokenizer; used by one thread at a time."""

    def __init__(self, vocab_size: int) -> None:
        """Take the width of the logits, which may exceed the tokenizer's vocabulary."""
        self._vocab_size = vocab_size
        self._source: SetTokenizer | None = None
        self._tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()

    def set_tokenizer(self, source: SetTokenizer) -> None:
        """Take the tokenizer; it is read when the first form is compiled."""
        if source != self._source:
            self._source, self._tokenizer = source, None
            self._cache.clear()

    def compile(self, spec: GrammarSpec) -> LLMatcher:
        """Return a matcher at the start of the form.

        Raises: RequestError with the library's reason if the form is wrong or not supported.
        Cost: milliseconds as a rule, up to seconds for very large schemas; nothing when known.
        """
        known = self._cache.get(spec)
        if known is None:
            known = self._compile_new(spec)
            self._cache[spec] = known
            if len(self._cache) > _MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(spec)
        return known.deep_copy()

    def _compile_new(self, spec: GrammarSpec) -> LLMatcher:
        from llguidance import LLMatcher  # noqa: PLC0415  loaded when first used

        field = "guided_json" if spec.kind == "json_object" else f"guided_{spec.kind}"
        try:
            grammar = _make_grammar(spec)
        except ValueError as cause:
            raise RequestError(f"{field} cannot be used: {cause}", param=field) from cause
        matcher = LLMatcher(self._load_tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().strip()
            raise RequestError(f"{field} cannot be used: {reason}", param=field)
        return matcher

    def _load_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer  # noqa: PLC0415  loaded when first used

        if self._tokenizer is None:
            if self._source is None:
                raise RequestError("structured output needs a fast tokenizer; the model has none")
            self._tokenizer = LLTokenizer(
                self._source.json, n_vocab=self._vocab_size, eos_token=self._source.eos_token_id
            )
        return self._tokenizer


def _make_grammar(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415  loaded when first used
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark  # noqa: PLC0415

    if spec.kind in ("json", "json_object"):
        whitespace = spec.whitespace_pattern or _JSON_WHITESPACE
        return LLMatcher.grammar_from_json_schema(
            spec.text or _ANY_JSON_OBJECT, overrides={"whitespace_pattern": whitespace}
        )
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        texts = [json.dumps(c, ensure_ascii=False) for c in json.loads(spec.text)]
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(spec.text))
    except GbnfToLarkError as cause:
        raise ValueError(str(cause)) from cause


class StructuredOutput:
    """The matchers of all running answers that have a form."""

    def __init__(self, vocab_size: int) -> None:
        """Take the width of the logits."""
        self._compiler = GrammarCompiler(vocab_size)
        self._mask_bytes = 4 * (-(-vocab_size // 32))
        self._thread: ThreadPoolExecutor | None = None
        self._starts: dict[str, LLMatcher] = {}
        self._matchers: dict[tuple[str, int], LLMatcher] = {}
        self._running: dict[str, set[int]] = {}

    def set_tokenizer(self, source: SetTokenizer) -> None:
        """Take the tokenizer that forms are compiled against."""
        self._compiler.set_tokenizer(source)

    def start_compile(self, spec: GrammarSpec) -> Future[LLMatcher]:
        """Compile in the background; the future holds the matcher or a RequestError."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        return self._thread.submit(self._compiler.compile, spec)

    def add(self, request_id: str, matcher: LLMatcher, num_branches: int = 1) -> None:
        """Follow a request's answers from the start of its form until each has ended."""
        self._starts[request_id] = matcher
        self._running[request_id] = set(range(num_branches))

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._starts.pop(request_id, None)
        for branch in self._running.pop(request_id, ()):
            self._matchers.pop((request_id, branch), None)

    def end_branch(self, request_id: str, branch: int) -> None:
        """Forget one answer; the request goes with its last one."""
        running = self._running.get(request_id)
        if running is None:
            return
        running.discard(branch)
        self._matchers.pop((request_id, branch), None)
        if not running:
            self.remove(request_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._starts

    def __len__(self) -> int:
        return len(self._starts)

    def _matcher(self, request_id: str, branch: int) -> LLMatcher:
        matcher = self._matchers.get((request_id, branch))
        if matcher is None:
            matcher = self._starts[request_id].deep_copy()
            self._matchers[request_id, branch] = matcher
        return matcher

    def next_mask(self, request_id: str, branch: int) -> bytes:
        """Return the ids that may come next, packed, one bit an id, as int32 words.

        Once the form is complete only the end token is allowed.

        Raises: RequestError if the form became too complex to follow.
        """
        matcher = self._matcher(request_id, branch)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(
                f"structured output cannot go on: {matcher.get_error().strip()}",
                param="guided_decoding",
            )
        return mask[: self._mask_bytes]

    def accept(self, results: Iterable[SequenceResult]) -> None:
        """Take the tokens of a step; results of requests without a form are ignored."""
        for result in results:
            if result.request_id not in self._starts:
                continue
            matcher = self._matcher(result.request_id, result.branch)
            for token_id in result.token_ids:
                if not matcher.is_stopped():
                    matcher.consume_token(token_id)
            if result.finish_reason is not None:
                self.end_branch(result.request_id, result.branch)

    def shutdown(self) -> None:
        """End the compiling thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
