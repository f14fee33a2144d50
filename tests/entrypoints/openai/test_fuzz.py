"""Any body at all: never a status 500, never a hang, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.entrypoints.openai.chat_request import ChatCompletionRequest
from vllm.entrypoints.openai.completion_request import CompletionRequest
from vllm.entrypoints.openai.request_base import OpenAIBaseModel
from vllm.entrypoints.openai.tokenize_request import DetokenizeRequest, TokenizeRequest

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["auto", "none", "required", "user", "text", "json_object", "{{ x }}", "["])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "function", "name", "arguments", "65"]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
ENDPOINTS: dict[str, tuple[type[OpenAIBaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "ab"}),
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": "ab"}]},
    ),
    "/tokenize": (TokenizeRequest, {"prompt": "ab"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [65]}),
}
ALLOWED = (200, 400, 404)


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_body_is_an_internal_error(hello: Any, path: str, data: st.DataObject) -> None:
    schema, valid = ENDPOINTS[path]
    names = sorted({*schema.model_fields, "no_such_field"} - {"model", "use_beam_search"})
    changed = data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3))
    body = {"model": "chain", **valid, **changed}
    reply = hello.http.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert reply.status_code in ALLOWED, (body, reply.text)
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in reply.text, (body, reply.text)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(messages=st.lists(VALUES, max_size=3), tools=st.none() | st.lists(VALUES, max_size=2))
def test_any_conversation(hello: Any, messages: list[Any], tools: Any) -> None:
    body = {"model": "chain", "messages": messages, "tools": tools, "tool_choice": "none"}
    reply = hello.http.post(
        "/v1/chat/completions",
        content=json.dumps(body),
        headers={"content-type": "application/json"},
    )
    assert reply.status_code in ALLOWED, (body, reply.text)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(max_size=60))
def test_any_bytes(hello: Any, content: bytes) -> None:
    for kind in ("application/json", "text/plain", ""):
        reply = hello.http.post(
            "/v1/completions", content=content, headers={"content-type": kind} if kind else {}
        )
        assert reply.status_code == 400, (content, reply.text)
