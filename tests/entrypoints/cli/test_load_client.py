"""One request of a load test against a server that answers as it is told."""

from __future__ import annotations

import json

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from vllm.entrypoints.cli.bench.dataset import Sample
from vllm.entrypoints.cli.bench.load_client import LoadTarget, RequestResult, send_request


async def ask(texts: list[str], num_tokens: int) -> RequestResult:
    """Return what becomes of a request that is answered with these pieces."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events: list[dict] = [{"choices": [{"text": text}]} for text in texts]
        events.append({"choices": [], "usage": {"completion_tokens": num_tokens}})
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server, ClientSession() as session:
        target = LoadTarget(url=str(server.make_url("/v1/completions")), model="m", api_key="k")
        sample = Sample(prompt="p", prompt_len=1, output_len=4)
        return await send_request(session, target, sample)


async def test_pieces() -> None:
    result = await ask(["a", "", "b"], 3)
    assert result.is_success
    assert result.generated_text == "ab"
    assert result.output_len == 3
    assert len(result.itl) == 1
    assert 0 < result.ttft <= result.latency


async def test_tokens_without_a_text_are_an_answer() -> None:
    result = await ask(["", ""], 2)
    assert result.is_success, result.error
    assert result.output_len == 2
    assert 0 < result.ttft == result.latency


async def test_no_token_is_none() -> None:
    result = await ask([], 0)
    assert result.error == "the answer is empty"
