"""The offline class on models of its own: lengths, split characters, no tokenizer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.utils.fixtures_models import chain_text
from tests.utils.one_thread import one_thread  # noqa: F401  a fixture for the whole module
from tests.utils.tiny_models import TinyModels
from vllm import LLM, AsyncEngineArgs, EngineArgs, SamplingParams
from vllm.errors import ConfigError, RequestError

SPELLING = {ord("C"): 257, 257: ord("G"), ord("G"): 258, 258: ord("J"), ord("J"): ord("K")}


def run(llm: LLM, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def test_max_tokens_none_runs_to_the_models_length(tiny_models: TinyModels) -> None:
    llm = LLM(str(tiny_models.loop()), max_model_len=40, num_gpu_blocks_override=8, dtype="float32")
    (output,) = run(llm, "A", SamplingParams(temperature=0, max_tokens=None))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 40
    assert output.outputs[0].finish_reason == "length"
    assert run(llm, "A" * 39, SamplingParams(max_tokens=9))[0].outputs[0].token_ids == [65]


@pytest.mark.parametrize(("max_tokens", "text"), [(20, "中文🌶é"), (8, "中文")])
def test_split_characters(tiny_models: TinyModels, max_tokens: int, text: str) -> None:
    """Case C28: a byte a token; the text is whole, and so are the bytes behind the logprobs."""
    from vllm.transformers_utils.detokenizer import TokenBytes

    data = "中文🌶é".encode()
    llm = LLM(str(tiny_models.chain({65: data[0], **chain_text("中文🌶é")})), dtype="float32",
              num_gpu_blocks_override=64)  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0)
    answer = run(llm, "A", params)[0].outputs[0]
    assert answer.text == text
    assert len(answer.token_ids) == min(max_tokens, 13)
    table = TokenBytes(llm.get_tokenizer())
    joined = b"".join(table[i] for i in answer.token_ids if i != 264)
    assert joined == data[:max_tokens]
    names = [
        entry[i].decoded_token for i, entry in zip(answer.token_ids, answer.logprobs, strict=True)
    ]
    assert "".join(names).removesuffix("</s>") == text


def test_without_a_tokenizer(tiny_models: TinyModels) -> None:
    llm = LLM(
        str(tiny_models.chain(SPELLING)), skip_tokenizer_init=True, num_gpu_blocks_override=64,
        dtype="float32",
    )  # fmt: skip
    (output,) = run(
        llm, {"prompt_token_ids": [67]}, SamplingParams(temperature=0, max_tokens=9, logprobs=1)
    )
    answer = output.outputs[0]
    assert answer.token_ids == [257, 71, 258, 74, 75, 264]
    assert answer.text == ""
    assert answer.finish_reason == "stop"
    assert answer.logprobs[0][257].decoded_token is None
    with pytest.raises(RequestError, match="give prompt_token_ids"):
        run(llm, "ABC", SamplingParams())
    with pytest.raises(RequestError, match="stop strings needs a tokenizer"):
        run(llm, {"prompt_token_ids": [67]}, SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.get_tokenizer()


def test_unknown_arguments() -> None:
    with pytest.raises(TypeError, match="max_model_length"):
        LLM("somewhere", max_model_length=3)
    with pytest.raises(ConfigError, match="does not exist"):
        LLM("/no/such/model")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("enforce_eager", "false", "True, False or None"),
        ("trust_remote_code", "no", "True or False"),
        ("trust_remote_code", 2, "True or False"),
        ("trust_remote_code", None, "True or False"),
        ("max_model_len", "512", "a whole number or None"),
        ("max_model_len", 512.5, "a whole number or None"),
        ("max_num_seqs", None, "a whole number"),
        ("max_num_seqs", True, "a whole number"),
        ("gpu_memory_utilization", "0.5", "a number"),
        ("tensor_parallel_size", [2], "a whole number"),
        ("model", 5, "text"),
        ("tokenizer", 5, "text or None"),
        ("load_format", {"auto": 1}, "text"),
        ("rope_scaling", "linear", "a dict or None"),
        ("served_model_name", 5, "text, a list or None"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_before_anything_is_read(
    name: str, value: object, words: str
) -> None:
    message = f"^{name} must be {words}, got {re.escape(repr(value))}"
    for make in (LLM, EngineArgs, AsyncEngineArgs):
        with pytest.raises(ConfigError, match=message):
            make(**{"model": "/no/such/model", name: value})


def test_fields_of_a_derived_class_are_its_own_matter() -> None:
    @dataclass
    class Derived(EngineArgs):
        extra: object = None

    assert Derived(extra=5).extra == 5


def test_paths_and_element_types_are_taken_by_name(tmp_path: Path) -> None:
    args = EngineArgs(model=tmp_path, tokenizer=tmp_path, dtype=torch.float32)
    assert (args.model, args.tokenizer) == (str(tmp_path), str(tmp_path))
    assert args.dtype == "torch.float32"


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("enforce_eager", np.bool_(True), True),
        ("trust_remote_code", np.bool_(False), False),
        ("seed", np.int64(3), 3),
        ("max_model_len", np.int32(64), 64),
        ("gpu_memory_utilization", np.float32(0.5), 0.5),
        ("swap_space", 4, 4),
    ],
)
def test_numbers_of_numpy_become_pythons(name: str, value: object, plain: object) -> None:
    taken = getattr(EngineArgs(**{name: value}), name)
    assert taken == plain
    assert type(taken) is type(plain)


def test_arguments_that_stand_for_text_and_numbers_pass(tiny_models: TinyModels) -> None:
    llm = LLM(
        tiny_models.loop(),  # a path
        enforce_eager=1,
        gpu_memory_utilization=1,
        seed=np.int64(3),
        num_gpu_blocks_override=64,
        dtype=torch.float32,
    )
    assert run(llm, "A", SamplingParams(max_tokens=1))[0].finished
