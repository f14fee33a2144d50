"""SamplingParams: defaults, every rule of every field, copies, and the parameters beside it."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from pydantic import BaseModel

from vllm.errors import RequestError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
)


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.best_of, params.max_tokens, params.min_tokens) == (1, None, 16, 0)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, -1, 0.0)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert params.repetition_penalty == 1.0
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])
    assert (params.logprobs, params.prompt_logprobs, params.seed) == (None, None, None)
    assert params.detokenize
    assert params.skip_special_tokens
    assert params.spaces_between_special_tokens
    assert not params.ignore_eos
    assert not params.include_stop_str_in_output
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert params.sampling_type is SamplingType.RANDOM


def test_positional_order() -> None:
    params = SamplingParams(2, 3, 0.1, 0.2, 1.3, 0.4, 0.5, 6, 0.7, 8)
    assert (params.n, params.best_of, params.presence_penalty, params.frequency_penalty) == (
        2,
        3,
        0.1,
        0.2,
    )
    assert (params.repetition_penalty, params.temperature, params.top_p) == (1.3, 0.4, 0.5)
    assert (params.top_k, params.min_p, params.seed) == (6, 0.7, 8)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("n", [1, 5], [0, -1, 1.5, "2", True]),
        ("best_of", [None, 1, 3], [0, "x"]),
        ("presence_penalty", [-2, 2, 0.5], [-2.1, 2.1, math.nan, "1"]),
        ("frequency_penalty", [-2, 2], [-3, 3, math.inf]),
        ("repetition_penalty", [0.1, 2], [0, -1, 2.1]),
        ("temperature", [0, 0.7, 100], [-0.1, math.nan, math.inf, None, "hot"]),
        ("top_p", [0.1, 1], [0, 1.1, -1]),
        ("top_k", [-1, 1, 50], [0, -2]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("seed", [None, 0, 2**62], [2**63, "1", 1.0]),
        ("max_tokens", [None, 1, 10**6], [0, -1, 1.5]),
        ("min_tokens", [0, 16], [-1, 17]),
        ("logprobs", [None, 0, 5], [-1, "2"]),
        ("prompt_logprobs", [None, 0, 5], [-1]),
        ("truncate_prompt_tokens", [None, 1], [0]),
        ("stop", ["a", ["a", "b"], None, []], ["", ["a", ""], [1], 7]),
        ("stop_token_ids", [None, [1, 2], (3,)], [["a"], "a", 5]),
        ("bad_words", [None, ["x"]], [[""], [1], "x"]),
        ("allowed_token_ids", [None, [1]], [[], 5, 0, "5", {1: 2}]),
        ("logit_bias", [None, {}, {1: 2.0}], [{"abc": 1}, {1: "x"}, {1: math.nan}, [1], 5, "x"]),
        ("logits_processors", [None, [], [max]], [5, max, [5], "max"]),
        ("guided_decoding", [None], [{"regex": "a"}, "a", 5]),
        ("ignore_eos", [True, 0, np.bool_(True)], ["false", 2, None, [1]]),
        ("detokenize", [False], ["no"]),
        ("skip_special_tokens", [False], ["no"]),
        ("include_stop_str_in_output", [True], [{}]),
        ("output_kind", [RequestOutputKind.FINAL_ONLY, 2], ["final", 7, None, [1]]),
    ],
)
def test_rules(field: str, good: list, bad: list) -> None:
    for value in good:
        SamplingParams(**{field: value})
    for value in bad:
        with pytest.raises(RequestError, match=field) as raised:
            SamplingParams(**{field: value})
        assert isinstance(raised.value, ValueError)
        assert raised.value.param == field


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": math.inf}, "a finite number of at least 0, got inf"),
        ({"temperature": "hot"}, "a finite number of at least 0, got 'hot'"),
        ({"top_p": 2.0}, r"a number in \(0, 1\], got 2.0"),
        ({"logit_bias": [1]}, r"a dict of token id to number, got \[1\]"),
        (
            {"guided_decoding": {"regex": "a"}},
            r"GuidedDecodingParams, such as .*, got {'regex': 'a'}",
        ),
        ({"logits_processors": 5}, "a list of functions, got 5"),
        ({"allowed_token_ids": 5}, r"a list of integers, got 5; write \[5\]"),
        ({"bad_words": "x"}, r"a list of texts, got 'x'; write \['x'\]"),
        ({"ignore_eos": "false"}, "True or False, got 'false'"),
        ({"output_kind": "final"}, r"a RequestOutputKind \(CUMULATIVE, DELTA, .*, got 'final'"),
    ],
)
def test_what_is_wrong_is_said(fields: dict, message: str) -> None:
    name = next(iter(fields))
    later = SamplingParams()
    setattr(later, name, fields[name])
    ways = [lambda: SamplingParams(**fields), later.verify, later.clone]
    if name != "guided_decoding":  # may be a dict inside of a dict
        ways.append(lambda: SamplingParams.from_dict(fields))
    ways.append(lambda: SamplingParams.from_optional(**fields))
    for make in ways:
        with pytest.raises(RequestError, match=f"^{name} must be {message}") as raised:
            make()
        assert raised.value.param == name


def test_later_changes_are_brought_to_one_form() -> None:
    params = SamplingParams()
    params.stop, params.allowed_token_ids, params.logit_bias = "ab", (1, 2), {"3": 1}
    params.verify()
    assert (params.stop, params.allowed_token_ids) == (["ab"], [1, 2])
    assert params.logit_bias == {3: 1.0}


def test_rules_over_several_fields() -> None:
    with pytest.raises(TypeError, match=r"top_k must be an integer, got 1\.5"):
        SamplingParams(top_k=1.5)
    with pytest.raises(ValueError, match="best_of must be at least n"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5
    with pytest.raises(ValueError, match="stop strings need text"):
        SamplingParams(stop="a", detokenize=False)
    with pytest.raises(ValueError, match="cannot be streamed"):
        SamplingParams(n=1, best_of=2, output_kind=RequestOutputKind.DELTA)
    with pytest.raises(TypeError, match="Unexpected keyword argument 'use_beam_search'"):
        SamplingParams(use_beam_search=True)


def test_greedy_resets_filters_and_allows_one_answer() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.2)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, -1, 0.0)
    assert params.sampling_type is SamplingType.GREEDY
    for fields in ({"n": 2}, {"best_of": 2}):
        with pytest.raises(ValueError, match="must be 1 when temperature is 0"):
            SamplingParams(temperature=0, **fields)


def test_small_temperatures_are_raised() -> None:
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert SamplingParams(temperature=0.02).temperature == 0.02


def test_forms_of_values() -> None:
    params = SamplingParams(
        seed=-1, logprobs=True, prompt_logprobs=False, logit_bias={"5": 500, 6: -500}
    )
    assert (params.seed, params.logprobs, params.prompt_logprobs) == (None, 1, None)
    assert params.logit_bias == {5: 100.0, 6: -100.0}
    assert SamplingParams(seed=3).sampling_type is SamplingType.RANDOM_SEED
    assert SamplingParams(n=2, best_of=4).num_branches == 4


def test_numbers_of_numpy_become_pythons() -> None:
    params = SamplingParams(
        n=np.int32(2), temperature=np.float32(0.5), top_k=np.int64(3), max_tokens=np.int64(7),
        seed=np.uint8(1), stop_token_ids=[np.int64(5)], allowed_token_ids=(np.int64(5),),
        logit_bias={np.int64(5): np.float32(1.5)},
    )  # fmt: skip
    assert SamplingParams(
        n=2, temperature=0.5, top_k=3, max_tokens=7, seed=1, stop_token_ids=[5],
        allowed_token_ids=[5], logit_bias={5: 1.5},
    ) == params  # fmt: skip
    assert msgspec.msgpack.encode(params), "it goes to the engine process"
    for field, wrong in (("n", np.float32(2)), ("top_p", np.float64("nan")), ("n", np.bool_(True))):
        with pytest.raises(RequestError, match=field):
            SamplingParams(**{field: wrong})
    for wrong in (["a"], 5.0, [True]):
        with pytest.raises(RequestError, match="allowed_token_ids must be a list of integers"):
            SamplingParams(allowed_token_ids=wrong)


def test_hold_back_length() -> None:
    assert SamplingParams(stop=["ab", "abcd"]).output_text_buffer_length == 3
    assert (
        SamplingParams(stop="abcd", include_stop_str_in_output=True).output_text_buffer_length == 0
    )


def test_from_optional() -> None:
    none = {
        name: None
        for name in SamplingParams.__struct_fields__
        if name != "output_text_buffer_length"
    }
    made = SamplingParams.from_optional(**none)
    assert made.max_tokens is None, "here None is a value of its own"
    made.max_tokens = 16
    assert made == SamplingParams()
    assert SamplingParams.from_optional(logit_bias={"7": 1}).logit_bias == {7: 1.0}
    with pytest.raises(ValueError, match="keyed by token id"):
        SamplingParams.from_optional(logit_bias={"x": 1})


def test_from_dict() -> None:
    params = SamplingParams.from_dict(
        {"max_tokens": 100, "stop": "x", "guided_decoding": {"choice": ["a"]}}
    )
    assert params == SamplingParams(
        max_tokens=100, stop=["x"], guided_decoding=GuidedDecodingParams(choice=["a"])
    )
    with pytest.raises(TypeError, match="no field 'temprature'; did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": 1})


def test_clone_shares_nothing_but_processors() -> None:
    def processor(ids, logits):
        return logits

    params = SamplingParams(stop=["a"], logits_processors=[processor], logit_bias={1: 2.0})
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    clone.logit_bias[2] = 1.0
    assert params.stop == ["a"]
    assert params.logit_bias == {1: 2.0}
    assert clone.logits_processors[0] is processor


def test_generation_config_adds_end_tokens_only() -> None:
    params = SamplingParams(stop_token_ids=[7])
    params.update_from_generation_config({"eos_token_id": [2, 7, 9], "temperature": 0.1}, 2)
    assert params.stop_token_ids == [7, 9]
    assert params.all_stop_token_ids == {7, 9}
    assert params.temperature == 1.0
    ignoring = SamplingParams(ignore_eos=True)
    ignoring.update_from_generation_config({"eos_token_id": 9}, 2)
    assert ignoring.stop_token_ids == []


def test_later_changes_are_checked_by_verify() -> None:
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(RequestError, match="top_p"):
        params.verify()


def test_travels() -> None:
    params = SamplingParams(
        stop=["a"], guided_decoding=GuidedDecodingParams(regex="a"), logit_bias={1: 1.0}
    )
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded == params


def test_guided_decoding() -> None:
    with pytest.raises(ValueError, match="json, regex; leave one"):
        GuidedDecodingParams(json="{}", regex="a")
    assert GuidedDecodingParams(json_object=False, regex="a").given_forms() == ["regex"]
    assert GuidedDecodingParams.from_optional() is None

    class Answer(BaseModel):
        value: int

    for given in (Answer, Answer(value=1)):
        schema = GuidedDecodingParams.from_optional(json=given).json
        assert schema["properties"]["value"]["type"] == "integer"
    assert GuidedDecodingParams(json=Answer) == GuidedDecodingParams.from_optional(json=Answer)
    assert GuidedDecodingParams(choice=("a", "b")).choice == ["a", "b"]
    with pytest.raises(ValueError, match=r"guided_json must be .* a pydantic model, got 3"):
        GuidedDecodingParams.from_optional(json=3)
    for field, wrong in (
        ("json", 3), ("regex", 5), ("choice", "a"), ("choice", [1]), ("grammar", ["a"]),
        ("json_object", "yes"), ("whitespace_pattern", 1),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=f"^guided_{field} must be .*, got"):
            GuidedDecodingParams(**{field: wrong})


def test_beam_search_params() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    assert (params.ignore_eos, params.temperature, params.length_penalty) == (False, 0.0, 1.0)
    for fields in (
        {"beam_width": 0}, {"max_tokens": 0}, {"temperature": -1}, {"ignore_eos": "no"},
        {"length_penalty": math.inf},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(fields))):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **fields})


def test_pooling_params() -> None:
    assert PoolingParams(additional_data=[1]).clone() == PoolingParams(additional_data=[1])
