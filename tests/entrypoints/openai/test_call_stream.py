"""The machine behind the tool parsers: any way of cutting an answer gives the same calls."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.entrypoints.openai.tool_parsers.builtin import (
    FORCED_CALLS,
    HermesToolParser,
    InternlmToolParser,
    Llama3JsonToolParser,
    MistralToolParser,
    extract_calls,
)
from vllm.entrypoints.openai.tool_parsers.call_stream import CallFormat, CallStream

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=5), JSON, max_size=3)
    ),
    min_size=1,
    max_size=3,
)


def write(call_format: CallFormat, calls: list[tuple[str, Any]], *, indent: int | None) -> str:
    """Write calls as a model would."""
    texts = [json.dumps({"name": n, "arguments": a}, indent=indent) for n, a in calls]
    if call_format is HermesToolParser.call_format:
        return "text " + "\n".join(f"<tool_call>\n{t}\n</tool_call>" for t in texts)
    if call_format is InternlmToolParser.call_format:
        return "text " + "".join(f"<|action_start|><|plugin|>{t}<|action_end|>" for t in texts)
    if call_format is MistralToolParser.call_format:
        return f"text [TOOL_CALLS][{', '.join(texts)}]"
    if call_format is FORCED_CALLS:
        return f"[{','.join(texts)}]"
    return "; ".join(texts)


FORMATS = [
    p.call_format
    for p in (HermesToolParser, InternlmToolParser, MistralToolParser, Llama3JsonToolParser)
] + [FORCED_CALLS]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FORMATS), CALLS, st.sampled_from([None, 1]), st.data())
def test_cuts_do_not_matter(
    call_format: CallFormat, calls: list[tuple[str, Any]], indent: int | None, data: st.DataObject
) -> None:
    text = write(call_format, calls, indent=indent)
    found = extract_calls(call_format, text)
    assert [(c.function.name, json.loads(c.function.arguments)) for c in found.tool_calls] == calls
    stream = CallStream(call_format)
    names: list[str] = []
    arguments: list[str] = []
    content, position = "", 0
    while position < len(text):
        size = data.draw(st.integers(1, 12))
        delta = stream.feed(text[position : position + size])
        position += size
        content += (delta and delta.content) or ""
        for call in (delta and delta.tool_calls) or ():
            if call.id is not None:
                names.append(call.function.name)
                arguments.append("")
            arguments[call.index] += call.function.arguments or ""
    last = stream.finish()
    assert last is None
    assert list(zip(names, map(json.loads, arguments), strict=True)) == calls
    assert content == ("" if not text.startswith("text") else "text ")


def test_ids() -> None:
    text = '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]'
    ids = [call.id for call in extract_calls(MistralToolParser.call_format, text).tool_calls]
    assert len(set(ids)) == 2
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    (call,) = extract_calls(FORCED_CALLS, '[{"name": "a", "parameters": {}}]').tool_calls
    assert call.id.startswith("chatcmpl-tool-")


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(FORMATS), st.text(alphabet='<tool_cal>[]{}"name:,; \n', max_size=60), st.data()
)
def test_text_is_never_lost(call_format: CallFormat, text: str, data: st.DataObject) -> None:
    stream = CallStream(call_format)
    content, position = "", 0
    while position < len(text):
        size = data.draw(st.integers(1, 7))
        delta = stream.feed(text[position : position + size])
        position += size
        content += (delta and delta.content) or ""
    delta = stream.finish()
    content += (delta and delta.content) or ""
    if not stream.num_calls:
        assert content == text
