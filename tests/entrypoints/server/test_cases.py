"""The public bug reports about the HTTP API, against a real server and a real (tiny) model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.utils.chain_checkpoint import SPLIT_TEXT
from tests.utils.server_process import ServerProcess

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream."""
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


def is_healthy(server: ServerProcess) -> bool:
    """Whether the engine still runs."""
    return server.http.get("/health").status_code == 200


# C14: zero alternatives still give the sampled tokens' log-probabilities


def test_c14_zero_alternatives(server: ServerProcess) -> None:
    body = server.complete(prompt="ABC", logprobs=0, temperature=0)
    logprobs = body["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == body["usage"]["completion_tokens"] == 6
    # the layers are zero, so the logits of the last token are known: a 1 times sqrt(320), others 0
    assert all(value == pytest.approx(-5.4e-6, abs=1e-3) for value in logprobs["token_logprobs"])
    for top in ({}, {"top_logprobs": 0}, {"top_logprobs": None}):
        body = server.chat("ABC", logprobs=True, temperature=0, **top)
        content = body["choices"][0]["logprobs"]["content"]
        assert len(content) == body["usage"]["completion_tokens"]
        assert all(entry["top_logprobs"] == [] for entry in content)
    assert server.chat("ABC", logprobs=False)["choices"][0]["logprobs"] is None


# C15: minus infinity never reaches the JSON


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.9}], ids=str)
def test_c15_filters_and_echo(server: ServerProcess, filters: dict[str, Any]) -> None:
    fields = {"prompt": "ABC", "max_tokens": 2, "temperature": 1.0}
    plain = server.complete(**fields, echo=True, logprobs=1)
    body = server.complete(**fields, echo=True, logprobs=1, **filters)
    for lists in (body["choices"][0]["logprobs"], plain["choices"][0]["logprobs"]):
        assert lists["token_logprobs"][0] is None
    num_prompt = 3
    got, wanted = body["choices"][0]["logprobs"], plain["choices"][0]["logprobs"]
    assert got["token_logprobs"][:num_prompt] == wanted["token_logprobs"][:num_prompt]
    scored = server.complete(**fields, prompt_logprobs=2, **filters)["choices"][0]
    assert len(scored["prompt_logprobs"]) == num_prompt
    events = server.stream(COMPLETIONS, **fields, echo=True, logprobs=1, **filters)
    assert text_of(events).startswith("ABC")


# C16: logit_bias on ids at the edges of the vocabulary


@pytest.mark.parametrize("key", ["320", "-1", "abc"])
def test_c16_bias_outside_the_vocabulary(server: ServerProcess, key: str) -> None:
    reply = server.post(COMPLETIONS, prompt="A", logit_bias={key: 5})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "logit_bias"
    assert is_healthy(server)


def test_c16_bias_on_added_and_padded_ids(server: ServerProcess) -> None:
    neighbour: dict[str, Any] = {}

    def run_neighbour() -> None:
        neighbour.update(server.complete(prompt="A", max_tokens=60, temperature=0))

    thread = threading.Thread(target=run_neighbour)
    thread.start()
    fields = {"prompt": "A", "max_tokens": 3, "temperature": 0, "skip_special_tokens": False}
    added = server.complete(**fields, logit_bias={"265": 100})
    assert added["choices"][0]["text"].startswith("<|im_end|>")
    padded = server.post(COMPLETIONS, **fields, logit_bias={"300": 100})
    assert padded.status_code in (200, 400)
    if padded.status_code == 200:
        assert padded.json()["choices"][0]["text"] == ""
    thread.join()
    assert neighbour["choices"][0]["text"] == "A" * 60
    assert is_healthy(server)


# C19: echo with max_tokens 0


def test_c19_score_without_generating(server: ServerProcess) -> None:
    body = server.complete(prompt="ABC", echo=True, logprobs=1, max_tokens=0)
    (choice,) = body["choices"]
    assert choice["text"] == "ABC"
    assert len(choice["logprobs"]["tokens"]) == 3
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(isinstance(v, float) for v in choice["logprobs"]["token_logprobs"][1:])
    assert body["usage"]["completion_tokens"] == 0
    events = server.stream(COMPLETIONS, prompt="ABC", echo=True, logprobs=1, max_tokens=0)
    assert text_of(events) == "ABC"
    assert events[0]["choices"][0]["logprobs"] == choice["logprobs"]
    default = server.complete(prompt="A", max_tokens=None)
    assert default["usage"]["completion_tokens"] == 16
    assert server.complete(prompt="ABC", max_tokens=0)["choices"][0]["text"] == ""
    assert is_healthy(server)


# C20: a stop string over several streamed tokens


@pytest.mark.parametrize(
    ("stop", "include", "text", "reason"),
    [
        ("DEFGHIJ", False, "", "DEFGHIJ"),
        ("DEFGX", False, "DEFGHIJK", None),
        ("DEFGHIJ", True, "DEFGHIJ", "DEFGHIJ"),
        ("EFG", False, "D", "EFG"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_c20_stop_string(
    server: ServerProcess, path: str, stop: str, include: bool, text: str, reason: str | None
) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 5, "temperature": 0, "stop": [stop], "include_stop_str_in_output": include,
    }  # fmt: skip
    if path == COMPLETIONS:
        fields["prompt"] = "ABC"
        whole = server.complete(**fields)["choices"][0]
        assert whole["text"] == text
    else:
        fields["messages"] = [{"role": "user", "content": "ABC"}]
        whole = server.chat(**fields)["choices"][0]
        assert whole["message"]["content"] == text
    events = server.stream(path, **fields)
    assert text_of(events) == text
    last = events[-1]["choices"][0]
    for choice in (whole, last):
        assert choice["stop_reason"] == reason
        assert choice["finish_reason"] == ("stop" if reason else "length")


# C21: usage in streams


@pytest.mark.parametrize(
    ("path", "prompts"),
    [
        (COMPLETIONS, {"prompt": "A"}),
        (COMPLETIONS, {"prompt": ["A", "BA"]}),
        (CHAT, {"messages": [{"role": "user", "content": "A"}]}),
    ],
    ids=["completion", "two prompts", "chat"],
)
def test_c21_usage(server: ServerProcess, path: str, prompts: dict[str, Any]) -> None:
    fields = {**prompts, "n": 2, "max_tokens": 5, "ignore_eos": True, "temperature": 1.0}
    whole = server.post(path, **fields).json()["usage"]
    num_prompts = len(prompts["prompt"]) if isinstance(prompts.get("prompt"), list) else 1
    assert whole["completion_tokens"] == 10 * num_prompts
    events = server.stream(path, **fields, stream_options={"include_usage": True})
    assert [bool(e.get("usage")) for e in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["choices"] == []
    final = events[-1]["usage"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert final[key] == whole[key]
    for options in ({}, None):
        events = server.stream(path, **fields, stream_options=options)
        assert not any(e.get("usage") for e in events)
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        e["usage"]["completion_tokens"]
        for e in server.stream(path, **fields, stream_options=options)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == whole["completion_tokens"]


# C22: echo and streaming, text offsets


def test_c22_echo_streams(server: ServerProcess) -> None:
    fields = {"prompt": "ABC", "echo": True, "max_tokens": 3, "temperature": 0}
    assert text_of(server.stream(COMPLETIONS, **fields)) == "ABCDEFGHI"
    whole = server.complete(**fields, logprobs=1)["choices"][0]["logprobs"]
    assert whole["text_offset"] == [0, 1, 2, 3, 6, 7]
    merged: dict[str, list[Any]] = {key: [] for key in whole}
    for event in server.stream(COMPLETIONS, **fields, logprobs=1):
        for key, values in event["choices"][0]["logprobs"].items():
            merged[key] += values
    assert merged["text_offset"] == whole["text_offset"]
    assert merged["tokens"] == whole["tokens"]
    assert merged["token_logprobs"][1:] == pytest.approx(whole["token_logprobs"][1:], abs=1e-5)
    two = server.stream(COMPLETIONS, **{**fields, "prompt": ["ABC", "XA"]}, logprobs=1)
    assert text_of(two, 0) == "ABCDEFGHI"
    assert text_of(two, 1) == "XAAAA"


# C28: characters split over tokens


@pytest.mark.parametrize("max_tokens", [20, 8])
def test_c28_split_characters(server: ServerProcess, max_tokens: int) -> None:
    fields = {"temperature": 0, "max_tokens": max_tokens}
    body = server.chat("~", **fields, logprobs=True)
    (choice,) = body["choices"]
    text = choice["message"]["content"]
    assert text == (SPLIT_TEXT if max_tokens == 20 else SPLIT_TEXT[:2])
    assert body["usage"]["completion_tokens"] == (13 if max_tokens == 20 else 8)
    joined = bytes(b for entry in choice["logprobs"]["content"] for b in entry["bytes"])
    assert joined == SPLIT_TEXT.encode()[:max_tokens]
    for path, prompt in (
        (CHAT, {"messages": [{"role": "user", "content": "~"}]}),
        (COMPLETIONS, {"prompt": "~"}),
    ):
        events = server.stream(path, **prompt, **fields)
        assert text_of(events) == text
        assert "\ufffd" not in str(events)


# requests of many kinds at once do not disturb each other


def test_mixed_load(server: ServerProcess) -> None:
    jobs = [
        lambda: server.complete(prompt="A", max_tokens=40)["choices"][0]["text"] == "A" * 40,
        lambda: server.complete(prompt="ABC", temperature=0)["choices"][0]["text"] == "DEFGHIJK",
        lambda: text_of(server.stream(COMPLETIONS, prompt="~")) == SPLIT_TEXT,
        lambda: server.post(COMPLETIONS, prompt="A", top_p=7).status_code == 400,
        lambda: server.post(COMPLETIONS, prompt="A" * 40000).status_code == 400,
        lambda: server.chat("A", max_tokens=9)["choices"][0]["message"]["content"] == "A" * 9,
    ] * 4
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda job: job(), jobs))
