"""The offline class: a model, prompts in, answers out.

Built on the synchronous engine, in the caller's process. A call either answers all of its prompts
or raises and leaves nothing queued.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from vllm.beam_search import BeamSearchOutput
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.llm_engine import LLMEngine
from vllm.entrypoints.offline_beam_search import search_beams
from vllm.entrypoints.offline_requests import (
    attach_guided_options,
    collect_prompts,
    match_params,
    render_chats,
)
from vllm.entrypoints.progress import ProgressBar
from vllm.errors import ConfigError, RequestError
from vllm.inputs import PromptType
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.prompt_adapter.request import PromptAdapterRequest
from vllm.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
)
from vllm.transformers_utils.tokenizer import cache_properties
from vllm.usage.usage_lib import UsageContext
from vllm.utils import Counter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ParamsLike = SamplingParams | Mapping[str, Any]


class LLM:
    """A model that answers prompts.

    Attributes:
        llm_engine: the engine below.
        request_counter: gives requests their ids "0", "1" ….
    """

    DEPRECATE_LEGACY: ClassVar[bool] = False

    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 4,
        cpu_offload_gb: float = 0,
        enforce_eager: bool | None = None,
        max_context_len_to_capture: int | None = None,
        max_seq_len_to_capture: int = 8192,
        disable_custom_all_reduce: bool = False,
        disable_async_output_proc: bool = False,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Load a model.

        Every argument is one of EngineArgs; `vllm serve --help` says what each means. Statistics
        are off here unless `disable_log_stats=False` is given.

        Raises:
            VllmError: what cannot be loaded or does not fit.
            TypeError: an argument that EngineArgs does not have.
        """
        kwargs.setdefault("disable_log_stats", True)
        args = EngineArgs(
            model=cast(str, model),  # EngineArgs takes the names of paths
            tokenizer=cast("str | None", tokenizer),
            tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            quantization=quantization,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            seed=seed,
            gpu_memory_utilization=gpu_memory_utilization,
            swap_space=swap_space,
            cpu_offload_gb=cpu_offload_gb,
            enforce_eager=enforce_eager,
            max_context_len_to_capture=max_context_len_to_capture,
            max_seq_len_to_capture=max_seq_len_to_capture,
            disable_custom_all_reduce=disable_custom_all_reduce,
            disable_async_output_proc=disable_async_output_proc,
            mm_processor_kwargs=mm_processor_kwargs,
            **kwargs,
        )
        self.llm_engine = LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
        self.request_counter = Counter()

    @classmethod
    @contextmanager
    def deprecate_legacy_api(cls) -> Iterator[None]:
        """Accepted, as in 0.6.3; the old keyword forms of generate keep working."""
        cls.DEPRECATE_LEGACY = True
        try:
            yield
        finally:
            cls.DEPRECATE_LEGACY = False

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer; RequestError where its initialisation was skipped."""
        return self.llm_engine.get_tokenizer()

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Use another tokenizer from now on; its special-token lists are computed once."""
        is_cached = type(tokenizer).__name__.startswith("Cached")
        self.llm_engine.set_tokenizer(tokenizer if is_cached else cache_properties(tokenizer))

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | list[LoRARequest] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        guided_options_request: Mapping[str, Any] | object | None = None,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, in batches as large as the cache allows.

        Args:
            prompts: one prompt (text, or a dict with `prompt` or `prompt_token_ids`) or several.
            sampling_params: one object or dict for all prompts, or one each.
            prompt_token_ids: old way to give ids.
            use_tqdm: whether a progress bar is shown.
            lora_request: refused.
            prompt_adapter_request: refused.
            guided_options_request: old way to ask for structured output; use `guided_decoding`.
            priority: one number a prompt, smaller is earlier; needs the priority policy.

        Returns: one finished output a prompt, in the order of the prompts.

        Raises:
            ValueError: arguments of different lengths, or a request that cannot be served. Nothing
                stays queued.
            TypeError: something that is no prompt or no params.
            EngineDeadError: the engine failed; the object is of no use after that.
        """
        if lora_request or prompt_adapter_request:
            raise RequestError("adapters are not served; merge the adapter into the model")
        every = collect_prompts(prompts, prompt_token_ids)
        params = match_params(sampling_params, len(every))
        if guided_options_request is not None:
            params = attach_guided_options(params, guided_options_request)
        if priority is not None and len(priority) != len(every):
            raise RequestError(
                f"{len(every)} prompts but {len(priority)} priorities were given; give one each"
            )
        for one in params:
            one.output_kind = RequestOutputKind.FINAL_ONLY
        return self._run(every, params, priority or [0] * len(every), use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several.

        The template writes the special tokens, so none are added when its text is tokenised.

        Args:
            messages: one list of OpenAI messages, or a list of such lists.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            lora_request: refused.
            chat_template: text of a template; None is the tokenizer's own.
            add_generation_prompt: whether the assistant's turn is opened.
            continue_final_message: whether the last message is continued instead.
            tools: given to the template.
            mm_processor_kwargs: refused.

        Raises: what `generate` raises; RequestError for malformed messages.
        """
        if mm_processor_kwargs:
            raise RequestError("only text models are served; leave mm_processor_kwargs out")
        prompts = render_chats(
            self.get_tokenizer(),
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def beam_search(
        self, prompts: Sequence[str | list[int]], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest answers to each prompt.

        Args:
            prompts: texts or lists of ids; a text alone is one prompt.
            params: of the search; `beam_width` may be at most half of the engine's max_logprobs.

        Returns: for each prompt its best sequences, best first; tokens and text include the prompt.

        Raises:
            RequestError: a prompt or the width cannot be served.
            TypeError: something that is no prompt or no params.
        """
        return search_beams(self, [prompts] if isinstance(prompts, str) else prompts, params)

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
    ) -> NoReturn:
        """Refuse: embedding models are not served."""
        raise ConfigError("embedding models are not served; use generate")

    def start_profile(self) -> NoReturn:
        """Refuse: there is no profiler."""
        self.llm_engine.start_profile()

    def stop_profile(self) -> NoReturn:
        """Refuse: there is no profiler."""
        self.llm_engine.stop_profile()

    def _run(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Queue requests and take steps until all have ended."""
        engine = self.llm_engine
        ids: list[str] = []
        finished: dict[str, RequestOutput] = {}
        try:
            for prompt, one, priority in zip(prompts, params, priorities, strict=True):
                request_id = str(next(self.request_counter))
                engine.add_request(request_id, prompt, one, priority=priority)
                ids.append(request_id)
            wanted = set(ids)
            with ProgressBar(len(ids), is_shown=use_tqdm) as bar:
                while len(finished) < len(ids):
                    for output in engine.step():
                        if not output.finished or output.request_id not in wanted:
                            continue
                        failure = engine.take_failure(output.request_id)
                        if failure is not None:
                            raise failure
                        finished[output.request_id] = output
                        bar.add(output)
        except BaseException:  # Ctrl-C as well: the next call must not meet these requests
            engine.abort_request(i for i in ids if i not in finished)
            raise
        return [finished[i] for i in ids]
