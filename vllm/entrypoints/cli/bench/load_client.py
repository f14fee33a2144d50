"""One streamed request of a load test, timed from the client's side."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.entrypoints.cli.bench.dataset import Sample

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_DECODE = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """Where requests go, and the fields that all of them carry.

    Attributes:
        is_chat: whether prompts are sent as one user message.
    """

    url: str
    model: str
    api_key: str
    is_chat: bool = False
    best_of: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False
    use_beam_search: bool = False


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """What became of one request; times in seconds.

    Attributes:
        output_len: tokens as the server counts them; None where it does not say.
        ttft: time to the first text; itl: gaps between later pieces.
        latency: time to the end.
        error: empty if it went well.
    """

    prompt_len: int
    output_len: int | None = None
    generated_text: str = ""
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    error: str = ""

    @property
    def is_success(self) -> bool:
        """Whether the whole answer came."""
        return not self.error


async def send_request(session: ClientSession, target: LoadTarget, sample: Sample) -> RequestResult:
    """Send one request and read its stream; errors end up in the result."""
    result = RequestResult(prompt_len=sample.prompt_len)
    headers = {"Authorization": f"Bearer {target.api_key}"}
    body = make_body(target, sample)
    start_s = time.perf_counter()
    try:
        async with session.post(target.url, json=body, headers=headers) as response:
            if response.status != 200:
                result.error = f"{response.status}: {(await response.text())[:500]}"
            else:
                await _read_stream(response, target, result, start_s)
    except Exception as cause:  # whatever the network does is a result
        result.error = repr(cause)
    return result


def make_body(target: LoadTarget, sample: Sample) -> dict[str, Any]:
    """Return the JSON body of a request."""
    body: dict[str, Any] = {
        "model": target.model,
        "temperature": 0.0,
        "max_tokens": sample.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.is_chat:
        body["messages"] = [{"role": "user", "content": sample.prompt}]
    else:
        body["prompt"] = sample.prompt
    if target.best_of > 1 or target.use_beam_search:
        body["best_of"] = target.best_of
    if target.use_beam_search:
        body["use_beam_search"] = True
        body["n"] = target.best_of
    if target.logprobs is not None:
        body["logprobs"] = True if target.is_chat else target.logprobs
    if target.ignore_eos:
        body["ignore_eos"] = True
    return body


async def _read_stream(
    response: ClientResponse, target: LoadTarget, result: RequestResult, start_s: float
) -> None:
    pieces: list[str] = []
    last_s = start_s
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        now_s = time.perf_counter()
        event = _DECODE(data)
        if "error" in event:
            result.error = str(event["error"].get("message", event["error"]))
            return
        if event.get("usage"):
            result.output_len = event["usage"]["completion_tokens"]
        for choice in event["choices"]:  # empty in the last event, which holds the usage
            text = choice["delta"].get("content") if target.is_chat else choice["text"]
            if not text:
                continue
            pieces.append(text)
            if result.ttft:
                result.itl.append(now_s - last_s)
            else:
                result.ttft = now_s - start_s
            last_s = now_s
    else:
        result.error = "the stream ended without [DONE]"
    result.generated_text = "".join(pieces)
    if not pieces and not result.error:
        # Tokens may have no text (made-up weights draw ids that a tokenizer lacks).
        last_s = time.perf_counter()
        result.ttft = last_s - start_s
        if not result.output_len:
            result.error = "the answer is empty"
    result.latency = last_s - start_s
