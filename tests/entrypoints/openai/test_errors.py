"""Bad requests: the status, both forms of the error object, and a server that goes on."""

from __future__ import annotations

import logging
from typing import Any

import openai
import pytest


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({}, "prompt", "required"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"prompt": "a", "max_tokens": 600}, "max_tokens", "maximum context length is 512"),
        ({"prompt": "a" * 600}, "max_tokens", "600 in the prompt"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "stream = true"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", "greater"),
        ({"prompt": "a", "logprobs": -1}, "logprobs", "greater"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "at most 20"),
        ({"prompt": "a", "n": 0}, "n", "at least 1"),
        ({"prompt": "a", "n": 9}, "n", "at most 8"),
        ({"prompt": "a", "best_of": 9}, "best_of", "at most 8"),
        ({"prompt": "a", "n": 2, "temperature": 0}, "n", "temperature is 0"),
        ({"prompt": "a", "n": 2, "best_of": 1}, "best_of", "at least n"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of", "streamed"),
        ({"prompt": "a", "temperature": -1}, "temperature", "of at least 0"),
        ({"prompt": "a", "top_p": 0}, "top_p", "(0, 1]"),
        ({"prompt": "a", "top_k": 0}, "top_k", "-1"),
        ({"prompt": "a", "seed": 2**63}, "seed", "less than"),
        ({"prompt": "a", "stop": [""]}, "stop", "empty"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "max_tokens"),
        ({"prompt": "a", "logit_bias": {"abc": 1}}, "logit_bias", "integer"),
        ({"prompt": "a", "logit_bias": {"320": 5}}, "logit_bias", "0 to 319"),
        ({"prompt": "a", "logit_bias": {"-1": 5}}, "logit_bias", "0 to 319"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "empty"),
        ({"prompt": "a", "allowed_token_ids": [320]}, "allowed_token_ids", "0 to 319"),
        ({"prompt": [5, 320]}, "prompt", "0 to 319"),
        ({"prompt": "a", "guided_regex": "a", "guided_json": {}}, "guided_regex", "only one"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"prompt": "a", "use_beam_search": True, "logprobs": 1}, "logprobs", "beam"),
        (
            {"prompt": "a", "use_beam_search": True, "prompt_logprobs": 0},
            "prompt_logprobs",
            "not available with use_beam_search",
        ),
        ({"prompt": "a", "priority": 1}, "priority", "--scheduling-policy"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "greater"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_completion_is_400_and_names_the_field(
    hello: Any, body: dict[str, Any], param: str, words: str
) -> None:
    reply = hello.post("/v1/completions", **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()
    assert words in error["message"]
    assert error["param"] == param
    assert (error["object"], error["type"], error["code"]) == ("error", "BadRequestError", 400)
    assert error["error"]["message"] == error["message"]
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["param"] == param
    assert hello.http.get("/health").status_code == 200
    assert hello.complete(prompt="a")["choices"][0]["text"] == "hello"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "text only"),
        ({"messages": [{"role": "user", "content": [{"type": "hum"}]}]}, None, "unknown part type"),
        ({"messages": [{"content": "x"}]}, None, "role"),
        ({"messages": ["x"]}, "messages", "dictionary"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs = true"),
        ({"use_beam_search": True, "logprobs": True}, "logprobs", "use_beam_search; leave one out"),
        ({"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs", "not available with"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "messages", "no"),
        ({"chat_template": "{% if %}"}, "messages", "chat template"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "cannot be set"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "cannot be set"),
        ({"tool_choice": "auto"}, "tool_choice", "`tools`"),
        ({"tool_choice": "maybe"}, "tool_choice", "'required'"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "together",
        ),
        ({"max_tokens": 500}, "max_tokens", "maximum context"),
        ({"max_completion_tokens": 500}, "max_completion_tokens", "maximum context"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_chat_is_400(hello: Any, body: dict[str, Any], param: str | None, words: str) -> None:
    messages = [{"role": "user", "content": "hi there"}]
    for stream in (False, True):
        reply = hello.post("/v1/chat/completions", **{"messages": messages, **body}, stream=stream)
        assert reply.status_code == 400, reply.text
        assert words in reply.json()["message"]
        if param is not None:
            assert reply.json()["param"] == param
    assert hello.chat()["choices"][0]["message"]["content"] == "hello"


def test_body_that_is_no_json(hello: Any) -> None:
    headers = {"content-type": "application/json"}
    for content in (b"{bad", b"", b"[1]", b'"text"', b"\xff\xfe", b"[" * 100_000, b"null"):
        reply = hello.http.post("/v1/completions", content=content, headers=headers)
        assert reply.status_code == 400, (content[:20], reply.text)
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert "body" in reply.json()["message"]
    form = hello.http.post("/v1/completions", content=b'{"model": "chain", "prompt": "a"}')
    assert form.status_code in (200, 400)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (b'"prompt": "\xe9"', "can't decode byte 0xe9"),
        (b'"prompt": ' + b"[" * 100_000, "recursion depth"),
        (b'"seed": ' + b"9" * 5000, "4300 digits"),
        (b'"prompt": a', "Expecting value"),
    ],
    ids=["latin-1", "deep", "long number", "no JSON"],
)
def test_body_that_cannot_be_read_says_why(hello: Any, fields: bytes, words: str) -> None:
    headers = {"content-type": "application/json"}
    body = b'{"model": "chain", ' + fields + b"}"
    reply = hello.http.post("/v1/completions", content=body, headers=headers)
    assert reply.status_code == 400
    assert words in reply.json()["message"]
    assert "JSON" in reply.json()["message"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_tokens", -1, "greater than or equal to 0, got -1"),
        ("max_tokens", 5.5, "a valid integer, got 5.5"),
        ("top_p", "much", 'got "much"'),
        ("stream", 2, "got 2"),
        ("stop", [["a"]], "got a list"),
        ("logit_bias", {"7": {}}, "got an object"),
        ("seed", "é" * 500, 'got "ééé'),
        ("seed", "é" * 500, "é…"),
    ],
    ids=str,
)
def test_a_value_of_a_wrong_kind_is_shown(hello: Any, field: str, value: Any, words: str) -> None:
    error = hello.post("/v1/completions", **{"prompt": "a", field: value}).json()
    assert error["param"] == field
    assert words in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    "fields",
    [
        '"prompt": "\\ud800"',
        '"prompt": "a", "stop": ["\\udfff"]',
        '"prompt": "a", "cache_salt": "\\ud800"',
        '"prompt": "a", "guided_regex": "\\ud800"',
        '"prompt": "a", "\\ud800": 1',
        '"prompt": "a", "model": "\\ud800"',
        '"prompt": "a", "response_format": {"type": "\\ud800"}',
        '"prompt": "a", "seed": 1e400',
        '"prompt": "a", "max_tokens": ' + "9" * 5000,
    ],
    ids=lambda fields: fields[:30],
)
def test_what_is_no_text_and_no_number(hello: Any, fields: str) -> None:
    body = f'{{"model": "chain", {fields}}}'
    headers = {"content-type": "application/json"}
    for path in ("/v1/completions", "/tokenize"):
        reply = hello.http.post(path, content=body, headers=headers)
        assert reply.status_code in ((400,) if path == "/v1/completions" else (200, 400)), (
            reply.text
        )
    chat = body.replace('"prompt"', '"messages": [{"role": "user", "content": "\\ud800"}], "x"')
    assert hello.http.post("/v1/chat/completions", content=chat, headers=headers).status_code == 400


def test_unknown_model_and_path(hello: Any) -> None:
    sdk = openai.OpenAI(base_url=f"{hello.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"
    assert "`other`" in caught.value.message
    assert hello.post("/tokenize", model="other", prompt="a").status_code == 404
    assert hello.http.get("/nowhere").json()["error"]["type"] == "not_found_error"
    assert hello.http.get("/v1/completions").status_code == 405
    embedding = hello.post("/v1/embeddings", input="a")
    assert embedding.status_code == 400
    assert "Embedding API disabled" in embedding.json()["message"]


def test_second_served_name_is_accepted_and_first_is_returned(hello: Any) -> None:
    assert hello.complete(model="chain-alias", prompt="a")["model"] == "chain"


def test_unknown_fields_are_ignored_with_one_warning(
    hello: Any, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        for _ in range(3):
            hello.complete(prompt="a", wibble_wobble=1, metadata={"a": 1})
            hello.chat(service_tier="auto", store=True)
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    for name in ("wibble_wobble", "service_tier"):
        assert sum(name in record.getMessage() for record in caplog.records) == 1


def test_null_means_absent(hello: Any) -> None:
    nulls = dict.fromkeys(
        ("max_tokens", "temperature", "stop", "n", "logprobs", "stream", "stream_options", "seed",
         "response_format", "logit_bias", "top_p", "user", "guided_json", "echo")
    )  # fmt: skip
    assert hello.complete(prompt="a", **nulls)["usage"]["completion_tokens"] == 2
    choice = hello.chat(**nulls, tools=None, tool_choice=None, top_logprobs=None)["choices"][0]
    assert choice["message"]["content"] == "hello"


def test_error_after_the_first_event_becomes_an_event(serve: Any) -> None:
    client = serve("hello hello hello", fails_after=3, delay_s=0.01)
    sdk = openai.OpenAI(base_url=f"{client.url}/v1", api_key="x", max_retries=0)
    pieces = []
    with pytest.raises(openai.APIError) as caught:
        for event in sdk.completions.create(model="chain", prompt="a", stream=True):
            pieces.append(event.choices[0].text)
    assert pieces == ["hello", " ", "hello"]
    assert "killed by the test" in caught.value.message


def test_dead_engine_is_500_everywhere(serve: Any) -> None:
    hello = serve()
    hello.engine.kill()
    assert hello.http.get("/health").status_code == 500
    for stream in (False, True):
        reply = hello.post("/v1/completions", prompt="a", stream=stream)
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "engine_dead"
    assert hello.post("/v1/completions", model="other", prompt="a").status_code == 404
