"""Chat completions over HTTP: prompts, roles, log-probabilities, chunks, clients."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from tokenizers.processors import TemplateProcessing

from tests.entrypoints.conftest import Client
from tests.utils.fixtures_models import build_chain_tokenizer
from tests.utils.http_server import serve_engine
from tests.utils.scripted_engine import ScriptedEngine

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def last_prompt(client: Any) -> str:
    """The text of the prompt that the engine was given last."""
    return client.engine.requests[-1][0]["prompt"]


def test_prompt_comes_from_the_template(hello: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    hello.chat(
        messages=[
            {"role": "system", "content": None},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ]
    )
    assert last_prompt(hello) == "system: \nuser: a\nb\nassistant: \ntool: 42\nassistant: "


def test_template_precedence(serve: Any, tmp_path: Any) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("server {{ messages[0].content }} {{ extra }}")
    client = serve(flags={"chat_template": file.read_text()})
    client.chat("x", chat_template_kwargs={"extra": "!"})
    assert last_prompt(client) == "server x !"
    client.chat("x", chat_template="request {{ messages[0].content }}")
    assert last_prompt(client) == "request x"


def test_defaults_and_limits(hello: Any) -> None:
    hello.chat()
    params = hello.engine.requests[-1][1]
    num_prompt_tokens = len(hello.engine.requests[-1][0]["prompt_token_ids"])
    assert params.temperature == 0.7
    assert params.max_tokens == 512 - num_prompt_tokens
    hello.chat(max_completion_tokens=7, max_tokens=3)
    assert hello.engine.requests[-1][1].max_tokens == 7


def test_whole_answer(hello: Any) -> None:
    body = hello.chat(n=2)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chat-")
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "hello",
        "tool_calls": [],
    }
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 4


def test_best_of(hello: Any) -> None:
    for body in (hello.chat(n=2, best_of=4), hello.complete(prompt="A", n=2, best_of=4)):
        assert [c["index"] for c in body["choices"]] == [0, 1]
        assert body["usage"]["completion_tokens"] == 4


def test_chunks_come_in_order(serve: Any) -> None:
    client = serve("hello DEF")
    events = client.stream(
        PATH, messages=USER, n=2, stream_options={"include_usage": True}, max_tokens=20
    )
    first, rest = events[:2], events[2:-1]
    assert [e["choices"][0]["index"] for e in first] == [0, 1]
    for event in first:
        assert event["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert event["choices"][0]["finish_reason"] is None
    for index in (0, 1):
        own = [e["choices"][0] for e in rest if e["choices"][0]["index"] == index]
        assert "".join(c["delta"]["content"] for c in own) == "hello DEF"
        assert [c["finish_reason"] for c in own] == [None, None, None, "stop"]
        assert all("stop_reason" not in c for c in own[:-1])
        assert own[-1]["stop_reason"] is None
    assert all("usage" not in e for e in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("options", "num_with_usage"),
    [({"include_usage": True}, 1), ({}, 0), (None, 0)],
)
def test_usage_in_streams(hello: Any, options: Any, num_with_usage: int) -> None:
    events = hello.stream(PATH, messages=USER, n=2, stream_options=options)
    assert sum("usage" in event for event in events) == num_with_usage
    whole = hello.chat(messages=USER, n=2)["usage"]
    assert all(event["usage"] == whole for event in events if "usage" in event)


def test_running_totals(hello: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = hello.stream(PATH, messages=USER, n=2, stream_options=options)
    assert [e["usage"]["completion_tokens"] for e in events] == [0, 0, 1, 2, 3, 4, 4]


@pytest.mark.parametrize("top", [{}, {"top_logprobs": 0}, {"top_logprobs": None}])
def test_logprobs_without_alternatives(hello: Any, top: dict[str, Any]) -> None:
    body = hello.chat(logprobs=True, **top)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"] == 2
    assert content[0] == {
        "token": "hello",
        "logprob": -0.25,
        "bytes": list(b"hello"),
        "top_logprobs": [],
    }
    assert hello.chat(logprobs=False)["choices"][0]["logprobs"] is None


def test_logprobs_with_alternatives_stream_alike(hello: Any) -> None:
    body = hello.chat(logprobs=True, top_logprobs=3)
    content = body["choices"][0]["logprobs"]["content"]
    assert [it["logprob"] for it in content[0]["top_logprobs"]] == [-0.25, -2.0, -9999.0]
    events = hello.stream(PATH, messages=USER, logprobs=True, top_logprobs=3)
    streamed = [
        entry
        for event in events
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


def test_split_characters(serve: Any) -> None:
    text = "中文🌶é"
    client = serve(list(text.encode()))
    body = client.chat(logprobs=True, max_tokens=20)
    (choice,) = body["choices"]
    assert choice["message"]["content"] == text
    joined = bytes(b for entry in choice["logprobs"]["content"] for b in entry["bytes"])
    assert joined.decode() == text
    assert body["usage"]["completion_tokens"] == len(text.encode()) + 1
    events = client.stream(PATH, messages=USER, max_tokens=20)
    pieces = [e["choices"][0]["delta"]["content"] for e in events]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_continued_messages(hello: Any, stream: bool) -> None:
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True}
    if stream:
        events = hello.stream(PATH, **body)
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
    else:
        text = hello.chat(**body)["choices"][0]["message"]["content"]
    assert text == "Well, hello"
    assert last_prompt(hello) == "user: hi\nassistant: Well, "


def test_echo_repeats_the_last_message_of_the_same_role(hello: Any) -> None:
    messages = [{"role": "assistant", "content": "I say "}]
    body = hello.chat(messages=messages, echo=True)
    assert body["choices"][0]["message"]["content"] == "I say hello"
    assert hello.chat(echo=True)["choices"][0]["message"]["content"] == "hello"


def test_response_role(serve: Any) -> None:
    client = serve(flags={"response_role": "robot"})
    assert client.chat()["choices"][0]["message"]["role"] == "robot"


def test_beam_search(hello: Any) -> None:
    body = hello.chat(use_beam_search=True, n=2, max_tokens=4)
    assert [c["message"]["content"] for c in body["choices"]] == ["hello", "hello"]
    assert body["usage"]["completion_tokens"] == 2
    events = hello.stream(PATH, messages=USER, use_beam_search=True, n=2, max_tokens=4)
    text = "".join(
        e["choices"][0]["delta"]["content"] for e in events if e["choices"][0]["index"] == 1
    )
    assert text == "hello"


def test_openai_client(serve: Any) -> None:
    client = serve("hello DEF")
    sdk = openai.OpenAI(base_url=f"{client.url}/v1", api_key="x", max_retries=0)
    assert [m.id for m in sdk.models.list()] == ["chain", "chain-alias"]
    assert sdk.models.retrieve("chain").id == "chain"
    whole = sdk.chat.completions.create(model="chain", messages=USER, logprobs=True, top_logprobs=1)
    assert whole.choices[0].message.content == "hello DEF"
    assert whole.choices[0].logprobs is not None
    with sdk.chat.completions.stream(
        model="chain", messages=USER, stream_options={"include_usage": True}
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "hello DEF"
    assert final.usage is not None
    assert final.usage.completion_tokens == 4
    texts = sdk.completions.create(model="chain", prompt=["A", "B"], n=2)
    assert [c.text for c in texts.choices] == ["hello DEF"] * 4


def test_tokenize_and_detokenize(hello: Any) -> None:
    reply = hello.post("/tokenize", prompt="ABC").json()
    assert reply == {"count": 3, "max_model_len": 512, "tokens": [65, 66, 67]}
    chat = hello.post("/tokenize", messages=USER).json()
    assert hello.post("/detokenize", tokens=chat["tokens"]).json() == {
        "prompt": "user: hi\nassistant: "
    }
    assert hello.post("/detokenize", tokens=[9999]).status_code == 400
    assert hello.post("/tokenize", prompt="a", messages=USER).status_code == 400
    assert hello.post("/tokenize", messages=[{"role": 1}]).status_code == 400


# C26: one BOS by the chat endpoint; with texts the caller is in charge


def test_c26_beginning_of_sequence() -> None:
    tokenizer = build_chain_tokenizer(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 263)]
    )
    engine = ScriptedEngine(tokenizer)
    with serve_engine(engine) as url:
        client = Client(engine, url)
        body = client.chat("AB")
        assert engine.requests[-1][0]["prompt_token_ids"] == [263, 65, 66]
        assert body["usage"]["prompt_tokens"] == 3
        ids = client.post("/tokenize", messages=[{"role": "user", "content": "AB"}]).json()[
            "tokens"
        ]
        assert ids == [263, 65, 66]
        for adds, wanted in ((True, [263, 263, 65, 66]), (False, [263, 65, 66])):
            client.complete(prompt="<s>AB", add_special_tokens=adds)
            assert engine.requests[-1][0]["prompt_token_ids"] == wanted
            reply = client.post("/tokenize", prompt="<s>AB", add_special_tokens=adds)
            assert reply.json()["tokens"] == wanted
        echoed = client.complete(prompt="AB", echo=True, logprobs=0, max_tokens=1)["choices"][0]
        assert echoed["text"] == "ABhello"
        assert echoed["logprobs"]["tokens"] == ["<s>", "A", "B", "hello"]
        assert echoed["logprobs"]["text_offset"] == [0, 0, 1, 2], "offsets point into the text"
        client.http.close()
