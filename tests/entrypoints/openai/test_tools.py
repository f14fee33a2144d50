"""Tool calls over HTTP: every tool choice, whole and streamed, with the parsers and a plugin."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "weather?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
HERMES = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
LLAMA = {"enable_auto_tool_choice": True, "tool_call_parser": "llama3_json"}
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TWO = f'Let me see. {ONE}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


def read_stream(events: list[dict[str, Any]]) -> tuple[str, list[tuple[str, Any]], str]:
    """Put a stream of one choice together: text, calls, finish reason."""
    text, finish = "", ""
    calls: list[list[str]] = []
    for event in events:
        choice = event["choices"][0]
        delta = choice["delta"]
        text += delta.get("content") or ""
        finish = choice["finish_reason"] or finish
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)
                assert call["type"] == "function"
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"].get("arguments", "")
    return text, [(name, json.loads(arguments)) for name, arguments in calls], finish


def read_whole(body: dict[str, Any]) -> tuple[str, list[tuple[str, Any]], str]:
    """The same of a whole body."""
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ]
    return message["content"] or "", calls, choice["finish_reason"]


@pytest.mark.parametrize(
    ("flags", "answer", "text", "calls"),
    [
        (HERMES, ONE, "", [("weather", {"city": "Köln"})]),
        (HERMES, TWO, "Let me see. ", [("weather", {"city": "Köln"}), ("now", {})]),
        (HERMES, "no <tool> here", "no <tool> here", []),
        (HERMES, "<tool_call> is a tag", "<tool_call> is a tag", []),
        (LLAMA, '{"name": "now", "parameters": {}}', "", [("now", {})]),
        (
            LLAMA,
            '{"name": "weather", "parameters": {"city": "a"}}; {"name": "now", "parameters": {}}',
            "",
            [("weather", {"city": "a"}), ("now", {})],
        ),
        (LLAMA, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        (LLAMA, "plain {text}", "plain {text}", []),
    ],
    ids=str,
)
def test_automatic_choice(
    serve: Any, flags: dict[str, Any], answer: str, text: str, calls: list[Any]
) -> None:
    client = serve(answer, flags=flags)
    body = client.chat(messages=USER, tools=TOOLS)
    finish = "tool_calls" if calls else "stop"
    assert read_whole(body) == (text, calls, finish)
    assert read_stream(client.stream(PATH, messages=USER, tools=TOOLS)) == (text, calls, finish)
    ids = [call["id"] for call in body["choices"][0]["message"]["tool_calls"]]
    assert all(call_id.startswith("chatcmpl-tool-") for call_id in ids)
    assert len(set(ids)) == len(ids)


def test_one_call_only_unless_parallel(serve: Any) -> None:
    client = serve(TWO, flags=HERMES)
    fields = {"messages": USER, "tools": TOOLS, "parallel_tool_calls": False}
    wanted = ("Let me see. ", [("weather", {"city": "Köln"})], "tool_calls")
    assert read_whole(client.chat(**fields)) == wanted
    assert read_stream(client.stream(PATH, **fields)) == wanted


def test_call_that_is_cut_off_is_text(serve: Any) -> None:
    client = serve(ONE, flags=HERMES)
    text, calls, finish = read_whole(client.chat(messages=USER, tools=TOOLS, max_tokens=40))
    assert ONE.startswith(text)
    assert (calls, finish) == ([], "length")


@pytest.mark.parametrize(
    ("flags", "fields", "answer"),
    [
        (HERMES, {}, f"{ONE}{ONE}"),
        (LLAMA, {}, '{"name": "weather", "parameters": {"city": "Rome"}}'),
        ({}, {"tool_choice": "required"}, '[{"name": "weather", "parameters": {"city": "Rome"}}]'),
    ],
    ids=["hermes", "llama", "required"],
)
def test_streamed_call_that_is_cut_off_ends_as_the_answer_did(
    serve: Any, flags: Any, fields: dict[str, Any], answer: str
) -> None:
    client = serve(answer, flags=flags)
    cut = len(answer) - len(answer) // 5  # one character is one token
    asked = {"messages": USER, "tools": TOOLS, **fields}
    whole = client.chat(**asked, max_tokens=cut)["choices"][0]
    assert (whole["message"]["tool_calls"], whole["finish_reason"]) == ([], "length")
    chunks = [event["choices"][0] for event in client.stream(PATH, **asked, max_tokens=cut)]
    assert any(chunk["delta"].get("tool_calls") for chunk in chunks)
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["length"]
    _, calls, finish = read_stream(client.stream(PATH, **asked))
    assert (calls[0][0], finish) == ("weather", "tool_calls")


@pytest.mark.parametrize("flags", [{}, HERMES])
@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"},
        {"tool_choice": "none", "tools": TOOLS},
        {"tool_choice": None, "tools": None},
    ],
)
def test_choice_none_is_plain_text(serve: Any, flags: Any, fields: dict[str, Any]) -> None:
    client = serve(flags=flags)
    assert read_whole(client.chat(messages=USER, **fields)) == ("hello", [], "stop")
    assert "tools" not in client.engine.requests[-1][0]["prompt"]


def test_template_sees_the_tools(serve: Any) -> None:
    client = serve(flags=HERMES)
    client.chat(messages=USER, tools=TOOLS)
    assert "tools 2" in client.engine.requests[-1][0]["prompt"]


def test_auto_without_a_parser_is_refused(hello: Any) -> None:
    reply = hello.post(PATH, messages=USER, tools=TOOLS)
    assert reply.status_code == 400
    assert "--enable-auto-tool-choice" in reply.json()["message"]


def test_named_choice(serve: Any) -> None:
    client = serve('{"city": "Rome"}')
    choice = {"type": "function", "function": {"name": "weather"}}
    fields = {"messages": USER, "tools": TOOLS, "tool_choice": choice}
    wanted = ("", [("weather", {"city": "Rome"})], "stop")
    assert read_whole(client.chat(**fields)) == wanted
    assert client.engine.requests[-1][1].guided_decoding.json == CITY
    assert read_stream(client.stream(PATH, **fields)) == wanted
    reply = client.post(PATH, **fields, guided_regex="a")
    assert reply.status_code == 400
    choice["function"]["name"] = "other"
    assert client.post(PATH, **fields).json()["param"] == "tool_choice"


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "now"}}], ids=str)
def test_function_without_parameters_takes_none(serve: Any, choice: Any) -> None:
    client = serve("{}")
    client.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "a"}],
        tools=[{"type": "function", "function": {"name": "now"}}],
        tool_choice=choice,
    )
    schema = client.engine.requests[-1][1].guided_decoding.json
    if choice == "required":
        schema = schema["items"]["anyOf"][0]["properties"]["parameters"]
    assert schema == {"type": "object", "properties": {}, "additionalProperties": False}


def test_required_choice(serve: Any) -> None:
    calls = [{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "now", "parameters": {}}]
    client = serve(json.dumps(calls))
    fields = {"messages": USER, "tools": TOOLS, "tool_choice": "required"}
    wanted = ("", [("weather", {"city": "Rome"}), ("now", {})], "tool_calls")
    assert read_whole(client.chat(**fields)) == wanted
    assert read_stream(client.stream(PATH, **fields)) == wanted
    schema = client.engine.requests[-1][1].guided_decoding.json
    assert schema["minItems"] == 1
    assert "maxItems" not in schema
    client.chat(**fields, parallel_tool_calls=False)
    assert client.engine.requests[-1][1].guided_decoding.json["maxItems"] == 1


def test_required_choice_keeps_definitions_reachable(serve: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/Place"}},
        "$defs": {"Place": {"type": "object", "properties": {"at": {"$ref": "#/$defs/Point"}}},
                  "Point": {"type": "number"}},
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": "go", "parameters": parameters}}]
    client = serve('[{"name": "go", "parameters": {}}]')
    client.chat(messages=USER, tools=tools, tool_choice="required")
    schema = client.engine.requests[-1][1].guided_decoding.json

    def resolve(reference: str) -> Any:
        node = schema
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
        return node

    (variant,) = schema["items"]["anyOf"]
    place = resolve(variant["properties"]["parameters"]["properties"]["place"]["$ref"])
    assert resolve(place["properties"]["at"]["$ref"]) == {"type": "number"}


def test_openai_client_streams_tool_calls(serve: Any) -> None:
    client = serve(TWO, flags=HERMES)
    sdk = openai.OpenAI(base_url=f"{client.url}/v1", api_key="x", max_retries=0)
    with sdk.chat.completions.stream(model="chain", messages=USER, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [c.function.name for c in calls] == ["weather", "now"]
    assert json.loads(calls[0].function.arguments) == {"city": "Köln"}
    assert final.choices[0].finish_reason == "tool_calls"


PLUGIN = """
from vllm.entrypoints.openai.protocol import (
    DeltaFunctionCall, DeltaMessage, DeltaToolCall, ExtractedToolCallInformation, FunctionCall,
    ToolCall)
from vllm.entrypoints.openai.tool_parsers import ToolParser, ToolParserManager


@ToolParserManager.register_module(["shout"])
class Shout(ToolParser):
    def extract_tool_calls(self, model_output, request):
        if model_output == "boom":
            raise KeyError("boom")
        call = ToolCall(type="function", function=FunctionCall(name=model_output, arguments="{}"))
        return ExtractedToolCallInformation(tools_called=True, tool_calls=[call], content=None)

    def extract_tool_calls_streaming(
            self, previous_text, current_text, delta_text,
            previous_token_ids, current_token_ids, delta_token_ids, request):
        assert previous_text + delta_text == current_text
        assert list(previous_token_ids) + list(delta_token_ids) == list(current_token_ids)
        if current_text == "boom":
            raise KeyError("boom")
        if previous_text or not delta_text:
            return None
        self.prev_tool_call_arr = [{"name": "x", "arguments": {"rest": True}}]
        self.streamed_args_for_tool = ['{"re']
        function = DeltaFunctionCall(name=current_text, arguments='{"re')
        return DeltaMessage(tool_calls=[
            DeltaToolCall(index=0, type="function", id="chatcmpl-tool-1",
                          function=function.model_dump(exclude_none=True))])
"""


@pytest.fixture
def shout_flags(tmp_path: Any) -> dict[str, Any]:
    """Flags that load a plugin."""
    path = tmp_path / "shout_parser.py"
    path.write_text(PLUGIN)
    return {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "shout",
        "tool_parser_plugin": str(path),
    }


def test_plugin(serve: Any, shout_flags: dict[str, Any]) -> None:
    client = serve("hello", flags=shout_flags)
    assert read_whole(client.chat(tools=TOOLS)) == ("", [("hello", {})], "tool_calls")
    streamed = read_stream(client.stream(PATH, messages=USER, tools=TOOLS))
    assert streamed == ("", [("hello", {"rest": True})], "tool_calls")


def test_plugin_that_fails_loses_no_text(serve: Any, shout_flags: dict[str, Any]) -> None:
    client = serve("boom", flags=shout_flags)
    assert read_whole(client.chat(tools=TOOLS)) == ("boom", [], "stop")
    text, _, _ = read_stream(
        [e for e in client.stream(PATH, messages=USER, tools=TOOLS)
         if "tool_calls" not in e["choices"][0]["delta"]]
    )  # fmt: skip
    assert text.endswith("m")
