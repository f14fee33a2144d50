"""Templates that come with requests: what they can use up, and who notices."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from typing import Any

import pytest

from vllm.entrypoints.openai.template_process import TemplateJob, TemplateProcess
from vllm.errors import RequestError

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
MESSAGES = [{"role": "user", "content": "ä"}]


def make_job(template: str, **fields: Any) -> TemplateJob:
    given: dict[str, Any] = {
        "special_tokens": {"bos_token": "<s>"},
        "messages": MESSAGES,
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "template_kwargs": None,
    }
    return TemplateJob(**{**given, "chat_template": template, **fields})


@pytest.fixture(scope="module")
def templates() -> TemplateProcess:
    return TemplateProcess()


def render(templates: TemplateProcess, template: str, **fields: Any) -> str:
    return asyncio.run(templates.render(make_job(template, **fields)))


def test_a_template_sees_all_that_it_may(templates: TemplateProcess) -> None:
    template = (
        "{{ bos_token }}{{ messages[0].content }}{{ tools | length }}{{ documents[0].a }}"
        "{{ add_generation_prompt }}{{ big }}"
    )
    text = render(
        templates,
        template,
        tools=[{"type": "function"}],
        documents=[{"a": "b"}],
        template_kwargs={"big": 2**70},
    )
    assert text == f"<s>ä1bTrue{2**70}"


def test_what_a_process_maps_at_its_start_is_not_the_templates() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (3 << 30, hard))  # of each thread of a library
    try:
        assert render(TemplateProcess(), "{{ 'a' * 1000000 }}") == "a" * 1000000
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


@pytest.mark.parametrize(
    "template", [ENDLESS, "{{ 9 ** (9 ** 9) }}"], ids=["loops", "one instruction"]
)
def test_a_template_that_takes_long_is_ended(templates: TemplateProcess, template: str) -> None:
    with pytest.raises(RequestError, match=r"chat template: it took more than 0.5 s") as caught:
        render(templates, template, limit_s=0.5)
    assert caught.value.param == "chat_template"
    assert render(templates, "{{ messages[0].content }}") == "ä"  # the next one is served


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'x' * 10 ** 11 }}", "MemoryError"),
        ("{{ 'x' * 2 ** 25 }}", "33554432 characters"),
        ("{{ raise_exception('no') }}", "no$"),
        (r"{{ '\ud800' }}", "surrogates not allowed"),
    ],
)
def test_a_template_that_fails_says_why(
    templates: TemplateProcess, template: str, words: str
) -> None:
    with pytest.raises(RequestError, match=f"chat template: .*{words}"):
        render(templates, template)


def test_templates_that_were_kept_make_room(templates: TemplateProcess) -> None:
    render(templates, "a")
    full = templates._process
    assert full is not None
    with pytest.raises(RequestError, match="MemoryError"):
        render(templates, "{{ 'x' * 10 ** 11 }}")
    assert full.returncode == 0
    assert render(templates, "a") == "a"
    assert templates._process is not full


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_others_are_served_meanwhile(hello: Any, path: str) -> None:
    replies = []

    def ask() -> None:
        replies.append(hello.post(path, messages=MESSAGES, chat_template=ENDLESS))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    begin_s = time.monotonic()
    assert hello.http.get("/health").status_code == 200
    assert hello.chat()["choices"][0]["message"]["content"] == "hello"
    assert time.monotonic() - begin_s < 2
    assert not replies
    asking.join()
    assert replies[0].status_code == 400
    assert "more than 5 s" in replies[0].json()["message"]
