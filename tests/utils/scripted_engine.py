"""An engine without a model: it writes what the test tells it to.

For tests of the HTTP layer. The text side (tokens to text, stop strings, outputs) is the real
one, so only the choice of the tokens is made up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from vllm.config import ModelConfig, SchedulerConfig
from vllm.engine.input_processor import InputProcessor
from vllm.engine.messages import CoreStats, EngineOutputs
from vllm.engine.output_processor import OutputProcessor
from vllm.engine.stats import EngineStats
from vllm.errors import EngineDeadError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.sequence import SequenceResult
from vllm.step import TokenLogprobs
from vllm.transformers_utils.detokenizer import TokenBytes
from vllm.types import FinishReason

VOCAB = 320


class ScriptedEngine:
    """Answers every prompt with the same token ids.

    Attributes:
        requests: prompts and parameters of everything that was asked, in order.
        running: ids of the requests that have not ended.
        aborted: ids of the requests that were ended by their consumer.
    """

    def __init__(
        self,
        tokenizer: Any,
        answer: str | Sequence[int] = "hello",
        *,
        delay_s: float = 0.0,
        fails_after: int | None = None,
        max_model_len: int = 512,
        policy: str = "fcfs",
        skip_tokenizer_init: bool = False,
    ) -> None:
        """Set the answer.

        Args:
            tokenizer: of FX-CHAIN.
            answer: text or ids; the end token follows, unless max_tokens comes first.
            delay_s: time a token takes.
            fails_after: tokens after which the engine dies.
            max_model_len: of the model config.
            policy: of the scheduler config.
            skip_tokenizer_init: of the model config: no text is made.
        """
        self.tokenizer = tokenizer
        ids = (
            tokenizer.encode(answer, add_special_tokens=False)
            if isinstance(answer, str)
            else answer
        )
        self.answer = [*ids, tokenizer.eos_token_id]
        self.requests: list[tuple[Any, Any]] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self._delay_s = delay_s
        self._fails_after = fails_after
        self._error: EngineDeadError | None = None
        self._config = ModelConfig(
            model="chain",
            tokenizer="chain",
            max_model_len=max_model_len,
            served_model_names=("chain", "chain-alias"),
            skip_tokenizer_init=skip_tokenizer_init,
            hf_config={"vocab_size": VOCAB, "num_hidden_layers": 1},
        )
        scheduler = SchedulerConfig(
            max_num_batched_tokens=512, max_num_seqs=8, max_model_len=max_model_len, policy=policy
        )
        known = None if skip_tokenizer_init else tokenizer
        self._inputs = InputProcessor(self._config, scheduler, known)
        self._table = None if known is None else TokenBytes(known)

    @property
    def is_running(self) -> bool:
        return self._error is None

    @property
    def is_stopped(self) -> bool:
        return self._error is not None

    @property
    def errored(self) -> bool:
        return self._error is not None

    @property
    def dead_error(self) -> EngineDeadError:
        return self._error or EngineDeadError("not dead")

    def kill(self) -> None:
        """End the engine."""
        self._error = EngineDeadError("killed by the test")

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        processed = self._inputs.process(request_id, prompt, sampling_params, priority=priority)
        self.requests.append((prompt, sampling_params))
        outputs = OutputProcessor(self._table)
        outputs.add(processed)
        self.running.add(request_id)
        try:
            for position in range(processed.request.max_tokens or len(self.answer)):
                await asyncio.sleep(self._delay_s)
                if position == self._fails_after:
                    self.kill()
                if self._error is not None:
                    raise self._error
                results = self._step(processed.request, position)
                report = EngineOutputs(results=results, stats=CoreStats(), time_s=float(position))
                for output in outputs.process(report).outputs:
                    yield output
                if not len(outputs):
                    return
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(request_id)
            raise
        finally:
            self.running.discard(request_id)

    def _step(self, request: Any, position: int) -> list[SequenceResult]:
        token = self.answer[min(position, len(self.answer) - 1)]
        reason = None
        if token == request.eos_token_id:
            reason = FinishReason.STOP
        elif position + 1 == request.max_tokens:
            reason = FinishReason.LENGTH
        sampling, prompt = request.sampling, request.prompt_token_ids
        wanted, wanted_prompt = sampling.num_logprobs, sampling.num_prompt_logprobs
        has_prompt = wanted_prompt is not None and position == 0
        return [
            SequenceResult(
                request_id=request.request_id,
                branch=branch,
                token_ids=[token],
                logprobs=None if wanted is None else [_logprobs(token, wanted)],
                prompt_logprobs=[_logprobs(t, wanted_prompt) for t in prompt[1:]]
                if has_prompt
                else None,
                prompt_start=1,
                finish_reason=reason,
                num_cached_tokens=len(prompt) // 2,
            )
            for branch in range(request.n)
        ]

    async def beam_search(
        self, prompt: Any, request_id: str, params: BeamSearchParams
    ) -> AsyncGenerator[RequestOutput, None]:
        ids = prompt["prompt_token_ids"]
        text = self.tokenizer.decode(self.answer[:-1])
        yield RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=ids,
            prompt_logprobs=None,
            finished=True,
            outputs=[
                CompletionOutput(index=i, text=text, token_ids=[*ids, *self.answer[:-1]])
                for i in range(params.beam_width)
            ],
        )

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def get_model_config(self) -> ModelConfig:
        return self._config

    async def stats(self) -> EngineStats:
        return EngineStats(num_running_requests=len(self.running))

    async def check_health(self) -> None:
        if self._error is not None:
            raise self._error

    def shutdown(self) -> None:
        self.kill()


def _logprobs(token: int, num_top: int) -> TokenLogprobs:
    """The chosen token first, then the likeliest; one of them impossible, as filters leave it."""
    top = [(token, -0.25), ((token + 1) % VOCAB, -2.0), ((token + 2) % VOCAB, float("-inf"))]
    chosen = [(token, -0.25), *top[:num_top]]
    return TokenLogprobs(
        token_ids=[i for i, _ in chosen], logprobs=[value for _, value in chosen], rank=1
    )
