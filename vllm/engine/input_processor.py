"""From a user's request to token ids, numbers and limits.

Runs in the caller's process, before anything reaches the engine side: whatever is wrong with a
request is said here, so that the engine never sees it. Tokenises, draws seeds, resolves end tokens
and checks every id against the vocabulary. Never imports torch.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import ModelConfig, SchedulerConfig
from vllm.engine.messages import AddRequest, GrammarKind, GrammarSpec
from vllm.errors import RequestError
from vllm.inputs import ParsedPrompt, parse_prompt
from vllm.logger import init_logger, warn_once
from vllm.sampling_params import GuidedDecodingParams, SamplingParams
from vllm.sequence import SequenceRequest
from vllm.step import RowSampling
from vllm.utils.field_checks import check_int, parse_eos_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRequest:
    """A request, ready for both sides.

    Attributes:
        request_id: the caller's; the engine side may know the request by another.
        message: what the engine side gets.
        prompt: text of the prompt, None when it was given as ids.
        params: a copy of the caller's, which stays as it was.
    """

    request_id: str
    message: AddRequest
    prompt: str | None
    params: SamplingParams

    @property
    def request(self) -> SequenceRequest:
        """The request as the scheduler will see it."""
        return self.message.request


class InputProcessor:
    """Turns prompts and sampling parameters into messages for the engine side.

    Attributes:
        eos_token_id: the token that ends an answer; None where nothing names one.
        max_prompt_len: most tokens of a prompt, so that one more can follow.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        scheduler_config: SchedulerConfig,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        """Take the resolved config; `tokenizer` is None when its initialisation was skipped."""
        self._model_config = model_config
        self._scheduler_config = scheduler_config
        self.tokenizer = tokenizer
        self._random = random.Random(model_config.seed)
        self.max_prompt_len = model_config.max_model_len - 1
        self.eos_token_id = _find_eos_id(model_config, tokenizer)
        named = parse_eos_ids(model_config.generation_config.get("eos_token_id"))
        self._extra_eos_ids = [i for i in named if i != self.eos_token_id]

    def process(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        engine_id: str | None = None,
    ) -> ProcessedRequest:
        """Check a request and turn it into messages.

        Args:
            request_id: the caller's id.
            prompt: text or ids.
            params: SamplingParams.
            priority: smaller is earlier.
            arrival_time: seconds since the epoch; now if unset.
            engine_id: the engine side's id, if another.

        Raises:
            RequestError: a field cannot be served; `param` names it.
            TypeError: the prompt or the params are of a type that means nothing here.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(
                f"params must be SamplingParams, got {type(params).__name__}; embedding requests "
                "are not served"
            )
        params = params.clone()
        params.verify()
        self._check_engine_limits(params, priority)
        parsed = parse_prompt(prompt)
        token_ids = self._tokenize(parsed)
        self.check_prompt(token_ids)
        grammar = self._grammar(params)
        stop_ids = self._stop_ids(params)
        if params.stop:
            self._need_tokenizer("stop strings")
        eos_id = None if params.ignore_eos else self.eos_token_id
        end_ids = stop_ids if eos_id is None else (eos_id, *stop_ids)
        sampling = self._row_sampling(params, end_ids, has_grammar=grammar is not None)
        processors = tuple(params.logits_processors or ())
        request = SequenceRequest(
            request_id=engine_id or request_id,
            prompt_token_ids=token_ids,
            sampling=sampling,
            n=params.num_branches,
            max_tokens=params.max_tokens,
            eos_token_id=eos_id,
            stop_token_ids=stop_ids,
            priority=priority,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            cache_salt=parsed.cache_salt or "",
            needs_host_token=bool(grammar or processors or sampling.reads_outputs),
            logits_processors=processors,
        )
        return ProcessedRequest(
            request_id=request_id,
            message=AddRequest(request=request, grammar=grammar),
            prompt=parsed.text,
            params=params,
        )

    def check_prompt(self, token_ids: list[int]) -> None:
        """Raise RequestError if a prompt is empty, too long or holds ids that do not exist."""
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        if len(token_ids) > self.max_prompt_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, but the model takes at most "
                f"{self.max_prompt_len} and one more for the answer (max_model_len "
                f"{self._model_config.max_model_len}); shorten it",
                param="prompt",
            )
        self._check_ids("prompt_token_ids", token_ids)

    def _check_engine_limits(self, params: SamplingParams, priority: int) -> None:
        limit = self._model_config.max_logprobs
        for name, value in (
            ("logprobs", params.logprobs),
            ("prompt_logprobs", params.prompt_logprobs),
        ):
            if value is not None and value > limit:
                raise RequestError(
                    f"{name} may be at most {limit} (max_logprobs), got {value}", param=name
                )
        if params.num_branches > self._scheduler_config.max_num_seqs:
            raise RequestError(
                f"n (or best_of) may be at most {self._scheduler_config.max_num_seqs} "
                f"(max_num_seqs), got {params.num_branches}",
                param="n" if params.best_of is None else "best_of",
            )
        check_int("priority", priority, low=-(2**63), high=2**63 - 1)
        if priority != 0 and self._scheduler_config.policy != "priority":
            raise RequestError(
                f"priority {priority} needs the priority policy; start the engine with "
                "--scheduling-policy priority",
                param="priority",
            )

    def _tokenize(self, prompt: ParsedPrompt) -> list[int]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        assert prompt.text is not None, "a parsed prompt has text or ids"
        ids: list[int] = self._need_tokenizer("a text prompt").encode(prompt.text)
        return ids

    def _need_tokenizer(self, what: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, but the engine was started with skip_tokenizer_init; "
                "give prompt_token_ids"
            )
        return self.tokenizer

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        if not ids:
            return
        vocab_size = self._model_config.vocab_size
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{name} holds {token_id}, but token ids go from 0 to {vocab_size - 1}",
                    param=name,
                )

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Ids beyond the vocabulary are left out: no token can ever match them."""
        extra = () if params.ignore_eos else self._extra_eos_ids
        every = dict.fromkeys([*(params.stop_token_ids or ()), *extra])
        return tuple(i for i in every if 0 <= i < self._model_config.vocab_size)

    def _row_sampling(
        self, params: SamplingParams, end_ids: tuple[int, ...], *, has_grammar: bool
    ) -> RowSampling:
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        num_logprobs = params.logprobs
        if num_logprobs is None and params.num_branches > params.n:
            num_logprobs = 0  # the best answers are chosen by the tokens' own log-probabilities
        min_tokens = params.min_tokens
        if min_tokens and has_grammar:
            warn_once(logger, "min_tokens is not applied under structured output: the form decides")
            min_tokens = 0
        allowed = params.allowed_token_ids
        return RowSampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=min(params.top_k, self._model_config.vocab_size),  # workers keep it in 32 bits
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            seed=self._seed(params),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=params.prompt_logprobs,
            min_tokens=min_tokens,
            stop_token_ids=end_ids,
            logit_bias=params.logit_bias,
            allowed_token_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
            bad_words_token_ids=self._bad_words(params),
        )

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        return 0 if params.is_greedy else self._random.getrandbits(63)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as the ids of a word at the start of a text, and of one behind a space."""
        if not params.bad_words:
            return ()
        tokenizer = self._need_tokenizer("bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(tokenizer.encode(text, add_special_tokens=False))
                if ids:
                    found[ids] = None
        return tuple(found)

    def _grammar(self, params: SamplingParams) -> GrammarSpec | None:
        guided = params.guided_decoding
        if guided is None or not guided.given_forms():
            return None
        self._need_tokenizer("structured output")
        return make_grammar_spec(guided)


def make_grammar_spec(guided: GuidedDecodingParams) -> GrammarSpec:
    """Return the form that `guided` asks for as plain text.

    Raises: RequestError if it is no JSON, no list of strings or no text.
    """
    kinds: dict[str, GrammarKind] = {
        "json": "json",
        "json_object": "json_object",
        "regex": "regex",
        "choice": "choice",
        "grammar": "grammar",
    }
    kind = kinds[guided.given_forms()[0]]
    return GrammarSpec(
        kind=kind, text=_grammar_text(kind, guided), whitespace_pattern=guided.whitespace_pattern
    )


def _grammar_text(kind: GrammarKind, guided: GuidedDecodingParams) -> str:
    if kind == "json_object":
        return ""
    if kind == "choice":
        choices = guided.choice
        if not choices or not all(isinstance(c, str) and c for c in choices):
            raise RequestError(
                f"guided_choice must be a list of texts that are not empty, got {choices!r}",
                param="guided_choice",
            )
        return json.dumps(choices)
    if kind == "json" and isinstance(guided.json, dict):
        return json.dumps(guided.json)
    text = {"json": guided.json, "regex": guided.regex, "grammar": guided.grammar}[kind]
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f"guided_{kind} must be text, got {text!r}", param=f"guided_{kind}")
    if kind == "json":
        try:
            json.loads(text)
        except ValueError as cause:
            raise RequestError(f"guided_json is not JSON: {cause}", param="guided_json") from cause
    return text


def _find_eos_id(config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    if tokenizer is not None:
        token_id = tokenizer.eos_token_id
        return token_id if isinstance(token_id, int) else None
    named = parse_eos_ids(config.hf_config.get("eos_token_id"))
    return named[0] if named else None
