"""Tokenizers of directories and of both real models; what is cached; life without torch."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from tests.utils.fixtures_models import build_chain_tokenizer
from vllm.errors import ConfigError
from vllm.transformers_utils.tokenizer import get_tokenizer

BOS = 263


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """FX-CHAIN's tokenizer with a post-processor that adds 263, as in case C26."""
    tokenizer = build_chain_tokenizer(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_c26_bos_is_what_the_tokenizer_gives(chain: Path) -> None:
    tokenizer = get_tokenizer(str(chain))
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<s>hello"
    assert tokenizer(rendered).input_ids == [BOS, BOS, 262]
    assert tokenizer(rendered, add_special_tokens=False).input_ids == [BOS, 262]


def test_directory_tokenizer_keeps_its_properties(chain: Path) -> None:
    tokenizer = get_tokenizer(str(chain))
    assert tokenizer.is_fast and tokenizer.truncation_side == "left"
    assert len(tokenizer) == 266 and tokenizer.vocab_size == 263
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, 264)
    assert sorted(tokenizer.all_special_ids) == [263, 264, 265]
    assert sorted(tokenizer.all_special_tokens) == ["</s>", "<s>", "<|im_end|>"]


def test_special_ids_are_what_decoding_skips(tmp_path: Path) -> None:
    """Tokens that a file marks special count, whether they have a role or not."""
    tokenizer = build_chain_tokenizer()
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("additional_special_tokens", None)
    config.pop("extra_special_tokens", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = get_tokenizer(str(tmp_path))
    skipped = {i for i in range(len(loaded)) if not loaded.decode([i], skip_special_tokens=True)}
    assert set(loaded.all_special_ids) == skipped == {263, 264, 265}


def test_properties_are_computed_once(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = get_tokenizer(str(chain))
    first = tokenizer.all_special_ids
    assert tokenizer.all_special_ids is first
    assert tokenizer.all_special_tokens is tokenizer.all_special_tokens
    started = time.perf_counter()
    for _ in range(10_000):
        _ = tokenizer.all_special_ids, len(tokenizer)
    assert time.perf_counter() - started < 0.5


@pytest.mark.parametrize(
    "copier", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))]
)
def test_a_copy_works_as_the_original(copier: Callable[[Any], Any], chain: Path) -> None:
    tokenizer = get_tokenizer(str(chain))
    copied = copier(tokenizer)
    assert copied("hello").input_ids == [BOS, 262]
    assert copied.all_special_ids == tokenizer.all_special_ids and len(copied) == 266


def test_slow_mode_falls_back_to_what_there_is(chain: Path) -> None:
    assert get_tokenizer(str(chain), "slow")("hello").input_ids == [BOS, 262]


def test_an_unknown_mode_is_refused(chain: Path) -> None:
    with pytest.raises(ConfigError, match=r"'fast'.*auto, slow"):
        get_tokenizer(str(chain), "fast")


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="--tokenizer"):
        get_tokenizer(str(tmp_path))


def recorded(model: str) -> list[dict[str, Any]]:
    """Prompts and ids of transformers reading the same file."""
    path = Path(__file__).parent / "recorded_prompts.json"
    return json.loads(path.read_text(encoding="utf-8"))[model]


def check_recorded(tokenizer: Any, model: str) -> None:
    for row in recorded(model):
        text = row["prompt"]
        is_chat = row["kind"] == "chat"
        if is_chat:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(text, add_special_tokens=not is_chat).input_ids
        assert ids == row["prompt_ids"], row["prompt"]
        assert tokenizer.decode(row["answer_ids"]) == row["answer"]


def test_smollm2_gives_the_recorded_ids(smollm2_gguf: Path) -> None:
    tokenizer = get_tokenizer(str(smollm2_gguf))
    check_recorded(tokenizer, "smollm2-135m")
    assert len(tokenizer) == 49152 and len(tokenizer.all_special_ids) == 17
    assert tokenizer.model_max_length == 8192
    ids = tokenizer("In 2018").input_ids
    assert ids == [*tokenizer("In 20").input_ids, 33, 40]  # digit by digit


def test_gemma3_gives_the_recorded_ids(gemma3_gguf: Path) -> None:
    tokenizer = get_tokenizer(str(gemma3_gguf))
    check_recorded(tokenizer, "gemma3-270m")
    assert len(tokenizer) == 262144 and tokenizer.chat_template is None
    assert tokenizer.decode(tokenizer("a  b\n\n\nc 中文 🌶").input_ids[1:]) == "a  b\n\n\nc 中文 🌶"


def test_without_torch(smollm2_gguf: Path, chain: Path) -> None:
    """What the API process does with a tokenizer never brings torch in, and torch works after."""
    code = f"""
        import sys, time
        from vllm.transformers_utils.tokenizer import get_tokenizer
        started = time.perf_counter()
        tokenizer = get_tokenizer({str(smollm2_gguf)!r}, without_torch=True)
        seconds = time.perf_counter() - started
        other = get_tokenizer({str(chain)!r}, without_torch=True)
        messages = [{{"role": "user", "content": "hello"}}]
        for t in (tokenizer, other):
            t.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            t.batch_decode([t("hello").input_ids])
            t.convert_ids_to_tokens([1, 2])
        assert "torch" not in sys.modules
        import torch
        assert torch.ones(2).sum() == 2
        print(seconds)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "PyTorch was not found" not in done.stderr
    assert float(done.stdout) < 10.0  # about 1 s when the machine has nothing else to do
