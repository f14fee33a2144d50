"""Text completions over HTTP: echo, scoring, log-probabilities, several choices, usage."""

from __future__ import annotations

from typing import Any

import pytest


def merge(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Put the events of a stream together, by choice."""
    merged: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            whole = merged.setdefault(choice["index"], {"text": "", "logprobs": None})
            whole["text"] += choice["text"]
            whole["finish_reason"] = choice["finish_reason"]
            whole["stop_reason"] = choice["stop_reason"]
            if choice["logprobs"] is not None:
                lists = whole["logprobs"] or {key: [] for key in choice["logprobs"]}
                whole["logprobs"] = {k: v + choice["logprobs"][k] for k, v in lists.items()}
    return merged


def as_choices(body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The choices of a whole body in the form that `merge` returns."""
    return {
        c["index"]: {k: c[k] for k in ("text", "logprobs", "finish_reason", "stop_reason")}
        for c in body["choices"]
    }


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "ABC"},
        {"prompt": [65, 66, 67], "echo": True},
        {"prompt": "ABC", "echo": True, "logprobs": 1},
        {"prompt": ["ABC", "D"], "echo": True, "logprobs": 2, "n": 2},
        {"prompt": "ABC", "logprobs": 0},
        {"prompt": "ABC", "echo": True, "max_tokens": 0, "logprobs": 1},
        {"prompt": ["ABC", "D"], "echo": True, "max_tokens": 0},
        {"prompt": "ABC", "max_tokens": 2},
        {"prompt": "ABC", "stop": ["lo"]},
        {"prompt": "ABC", "stop": ["o D"], "include_stop_str_in_output": True},
        {"prompt": "ABC", "stop_token_ids": [257]},
        {"prompt": "ABC", "use_beam_search": True, "n": 2},
    ],
    ids=str,
)
def test_stream_says_the_same_as_the_whole_body(serve: Any, body: dict[str, Any]) -> None:
    client = serve("hello DEF")
    whole = client.complete(**body)
    options = {"stream_options": {"include_usage": True}}
    events = client.stream("/v1/completions", **body, **options)
    assert merge(events) == as_choices(whole)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    assert all(len(event["choices"]) == 1 for event in events[:-1])
    assert {(e["id"], e["object"]) for e in events} == {(events[0]["id"], "text_completion")}


def test_echo_and_offsets(hello: Any) -> None:
    body = hello.complete(prompt="ABC", echo=True, logprobs=1, max_tokens=3)
    (choice,) = body["choices"]
    assert choice["text"] == "ABChello"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["A", "B", "C", "hello", "</s>"]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 8]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert choice["prompt_logprobs"] is None


def test_scoring_a_prompt_generates_nothing(hello: Any) -> None:
    body = hello.complete(prompt="ABC", echo=True, logprobs=1, max_tokens=0)
    (choice,) = body["choices"]
    assert choice["text"] == "ABC"
    assert len(choice["logprobs"]["tokens"]) == 3
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert hello.complete(prompt="ABC", max_tokens=0)["choices"][0]["text"] == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": ""},
        {"prompt": [-5], "echo": True},
        {"prompt": [320], "echo": True},
        {"temperature": -1},
        {"n": 0},
        {"n": 9, "temperature": 1},
        {"priority": 1},
    ],
    ids=str,
)
def test_scoring_a_prompt_checks_every_field(hello: Any, wrong: dict[str, Any]) -> None:
    reply = hello.post("/v1/completions", **{"prompt": "ABC", "max_tokens": 0, **wrong})
    assert reply.status_code == 400, reply.text


def test_null_max_tokens_is_sixteen(serve: Any) -> None:
    body = serve([65] * 40).complete(prompt="A", max_tokens=None)
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


def test_impossible_tokens_are_clamped(hello: Any) -> None:
    body = hello.complete(prompt="ABC", echo=True, logprobs=3, prompt_logprobs=3, max_tokens=2)
    (choice,) = body["choices"]
    assert -9999.0 in choice["logprobs"]["top_logprobs"][1].values()
    assert choice["prompt_logprobs"][0] is None
    entry = choice["prompt_logprobs"][1]
    assert min(it["logprob"] for it in entry.values()) == -9999.0
    assert set(entry["66"]) == {"logprob", "rank", "decoded_token"}


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_number_of_alternatives(hello: Any, num_top: int) -> None:
    logprobs = hello.complete(prompt="A", logprobs=num_top)["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 2
    assert all(1 <= len(entry) <= num_top + 1 for entry in logprobs["top_logprobs"])


def test_usage_counts_every_choice_and_each_prompt_once(hello: Any) -> None:
    body = hello.complete(prompt=["ABC", "D"], n=2, temperature=1.0)
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    usage = body["usage"]
    assert usage["prompt_tokens"] == 4
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == 12
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}])
def test_stream_without_usage(hello: Any, options: Any) -> None:
    events = hello.stream("/v1/completions", prompt="A", stream_options=options)
    assert all(event["usage"] is None for event in events)
    assert all(event["choices"] for event in events)


def test_running_totals(hello: Any) -> None:
    events = hello.stream(
        "/v1/completions",
        prompt=["A", "BC"],
        n=2,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == [*range(1, 9), 8]
    assert {event["usage"]["prompt_tokens"] for event in events} == {3}


def test_tokens_as_ids(serve: Any) -> None:
    client = serve(flags={"return_tokens_as_token_ids": True})
    logprobs = client.complete(prompt="A", logprobs=1, max_tokens=1)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:262"]
    assert list(logprobs["top_logprobs"][0]) == ["token_id:262"]


def test_truncation_keeps_the_end(hello: Any) -> None:
    body = hello.complete(prompt="ABCDE", truncate_prompt_tokens=2, echo=True, max_tokens=1)
    assert body["usage"]["prompt_tokens"] == 2
    assert body["choices"][0]["text"] == "CDEhello"


def test_text_that_is_tokenised_off_the_loop(serve: Any) -> None:
    client = serve(max_model_len=100_000)
    assert client.complete(prompt="A" * 30_000)["usage"]["prompt_tokens"] == 30_000


def test_server_without_a_tokenizer(serve: Any) -> None:
    client = serve([65, 66], skip_tokenizer_init=True)
    body = client.complete(prompt=[7, 8], max_tokens=2, logprobs=0)
    assert body["choices"][0]["text"] == ""
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:65", "token_id:66"]
    assert body["usage"]["completion_tokens"] == 2
    for path, fields in (
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "text"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        reply = client.post(path, **fields)
        assert reply.status_code == 400, path
        assert "--skip-tokenizer-init" in reply.json()["message"]


def test_parameters_reach_the_engine(serve: Any) -> None:
    client = serve(policy="priority")
    client.complete(
        prompt="A", temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, repetition_penalty=1.1,
        frequency_penalty=0.2, presence_penalty=0.3, logit_bias={"65": 200}, bad_words=["x"],
        allowed_token_ids=[65, 262, 264], stop_token_ids=[9], ignore_eos=False, min_tokens=1,
        skip_special_tokens=False, priority=5, cache_salt="tenant", user="me",
        guided_choice=["hello"],
    )  # fmt: skip
    prompt, params = client.engine.requests[-1]
    assert prompt == {"prompt_token_ids": [65], "prompt": "A", "cache_salt": "tenant"}
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.seed, params.repetition_penalty) == (3, 1.1)
    assert (params.frequency_penalty, params.presence_penalty) == (0.2, 0.3)
    assert params.logit_bias == {65: 100.0}
    assert params.allowed_token_ids == [65, 262, 264]
    assert (params.bad_words, params.stop_token_ids) == (["x"], [9])
    assert (params.min_tokens, params.skip_special_tokens) == (1, False)
    assert params.guided_decoding.choice == ["hello"]
