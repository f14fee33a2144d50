"""Any body at all, against a real engine: never a status 500, and nobody's request ends it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.utils.server_process import ServerProcess
from vllm.entrypoints.openai.chat_request import ChatCompletionRequest
from vllm.entrypoints.openai.completion_request import CompletionRequest
from vllm.entrypoints.openai.request_base import SamplingFields

NUMBERS = (
    st.integers(-3, 40)
    | st.integers()
    | st.floats()
    | st.sampled_from([2**31, 2**63 - 1, 2**64, -(2**31), 1e308, -1e308, 5e-324, 0.0, 1.0])
)
TEXTS = st.text(max_size=4) | st.sampled_from(["A", "DEF", "[", "(a|b)*", "start: /a+/", "{}"])
VALUES = (
    st.none()
    | st.booleans()
    | NUMBERS
    | TEXTS
    | st.lists(NUMBERS | TEXTS, max_size=3)
    | st.dictionaries(TEXTS | st.integers(-2, 330).map(str), NUMBERS | TEXTS, max_size=2)
    | st.sampled_from([{"type": "json_object"}, {"type": "object"}, {"include_usage": True}])
)
ENDPOINTS: dict[str, tuple[type[SamplingFields], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "ABC", "max_tokens": 4}),
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": "C"}], "max_tokens": 4},
    ),
}


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_body_ends_the_engine(server: ServerProcess, path: str, data: st.DataObject) -> None:
    schema, valid = ENDPOINTS[path]
    names = sorted(set(schema.model_fields) - {"model"})
    changed = data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=4))
    body = {"model": "model", **valid, **changed}
    reply = server.http.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert reply.status_code in (200, 400), (body, reply.text)
    if reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.text.endswith("data: [DONE]\n\n")
    assert server.http.get("/health").status_code == 200, body
