"""A real model from a real file, answering real clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.utils.server_process import ServerProcess, wait_until

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def smol(smollm2_gguf: Path) -> Iterator[ServerProcess]:
    """SmolLM2-135M-Instruct from its GGUF file, with all defaults."""
    flags = ("--max-model-len", "2048", "--num-gpu-blocks-override", "600")
    with ServerProcess(smollm2_gguf, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(smol: ServerProcess) -> openai.OpenAI:
    """OpenAI's own client."""
    return openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_chat_streams_what_it_answers_whole(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(
        model="model", messages=QUESTION, temperature=0, max_completion_tokens=24
    )
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    pieces = []
    usage = None
    for event in sdk.chat.completions.create(
        model="model", messages=QUESTION, temperature=0, max_completion_tokens=24, stream=True,
        stream_options={"include_usage": True},
    ):  # fmt: skip
        usage = event.usage or usage
        pieces += [choice.delta.content or "" for choice in event.choices]
    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens, "the same prompt was just computed"


def test_answer_of_a_given_form(sdk: openai.OpenAI) -> None:
    schema = {"name": "person", "schema": PERSON, "strict": True}
    reply = sdk.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": "Invent a person."}],
        response_format={"type": "json_schema", "json_schema": schema},
        temperature=0,
        max_tokens=60,
    )
    person = json.loads(reply.choices[0].message.content or "")
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)


def test_tools(sdk: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "How is the weather in Paris?"}]
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        with sdk.chat.completions.stream(
            model="model", messages=messages, tools=TOOLS, tool_choice=choice, temperature=0,
            max_tokens=60, parallel_tool_calls=False,
        ) as stream:  # fmt: skip
            final = stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls or []
        assert call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) == {"city"}


def test_choices_and_regex(smol: ServerProcess) -> None:
    body = smol.chat("Yes or no?", guided_choice=["yes", "no"], max_tokens=5)
    assert body["choices"][0]["message"]["content"] in ("yes", "no")
    body = smol.complete(prompt="A date:", guided_regex=r"\d{4}-\d{2}", max_tokens=10)
    year, _, month = body["choices"][0]["text"].partition("-")
    assert (len(year), len(month)) == (4, 2)


def test_memory_of_the_api_process(smol: ServerProcess) -> None:
    libraries = Path(f"/proc/{smol.process.pid}/maps").read_text()
    assert "libtorch" not in libraries, "the API process must not load torch"
    wait_until(lambda: smol.stats()["num_running_requests"] == 0, 5, "nothing runs")


def test_a_schema_that_cannot_be_used_is_blamed_on_the_field_it_came_in(
    sdk: openai.OpenAI,
) -> None:
    wrong = {"type": "nonsense"}
    tool = {"type": "function", "function": {"name": "go", "parameters": wrong}}
    asked = {
        "response_format": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "wrong", "schema": wrong},
            }
        },
        "tools": {"tools": [tool], "tool_choice": "required"},
        "guided_json": {"extra_body": {"guided_json": wrong}},
    }
    for field, fields in asked.items():
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                sdk.chat.completions.create(
                    model="model",
                    messages=QUESTION,
                    stream=stream,
                    **fields,
                )
            assert caught.value.param == field
            assert f"{field} cannot be used: Invalid type: nonsense" in caught.value.message
