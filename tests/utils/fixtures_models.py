"""The tiny models of the public cases: FX-REACH, FX-CHAIN and FX-FLAT, built from a seed.

Tests of every floor build them here, as transformers models, and save them as checkpoints. Nothing
is downloaded. `shared/cases/cases.md` describes what each fixture is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

REACH_VOCAB = 320
CHAIN_VOCAB = 320
CHAIN_END = 264
"""Where FX-CHAIN goes from a token without an entry: </s>."""

_CHAIN_MERGES = ("DE", "DEF", "HI", "he", "hel", "hell", "hello")
_CHAIN_SPECIALS = ("<s>", "</s>", "<|im_end|>")


def build_model(model_type: str, config: Mapping[str, Any]) -> PreTrainedModel:
    """Build a transformers causal LM, untrained, float32, eager attention, eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(model_type, **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            made, attn_implementation="eager", dtype=torch.float32
        )
    return model.eval()


def fill_matrices(model: PreTrainedModel, std: float = 0.08, seed: int = 0) -> None:
    """Draw every matrix from N(0, std) in the order of the parameters; vectors stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, std, generator=generator)


def build_reach(model_type: str = "llama", **config: Any) -> PreTrainedModel:
    """FX-REACH: a random model that shows which positions a token sees.

    Args:
        model_type: transformers' name, e.g. "mistral", "gemma2", "gemma3_text".
        **config: fields that differ from the fixture's, e.g. sliding_window=20.
    """
    base = {
        "vocab_size": REACH_VOCAB,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if model_type in ("gemma2", "gemma3_text"):
        base["query_pre_attn_scalar"] = 64
    model = build_model(model_type, base | config)
    fill_matrices(model)
    return model


def make_reach_prompt(num_tokens: int = 80, seed: int = 1) -> list[int]:
    """The prompt of FX-REACH: ids 3..299."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (num_tokens,), generator=generator).tolist()


def change_token(token: int) -> int:
    """The replacement of a token in the reach test."""
    return (token + 4) % 297 + 3


def build_chain(next_token: Mapping[int, int] | None = None, **config: Any) -> PreTrainedModel:
    """FX-CHAIN: greedy output is a look-up on the last token.

    Args:
        next_token: the look-up; a token without an entry goes to CHAIN_END. {65: 65} is the loop
            model.
        **config: fields that differ from the fixture's, e.g. max_position_embeddings.
    """
    base = {
        "vocab_size": CHAIN_VOCAB,
        "hidden_size": CHAIN_VOCAB,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 263,
        "eos_token_id": CHAIN_END,
        "pad_token_id": None,
    }
    model = build_model("llama", base | config)
    targets = dict(next_token or {})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
        model.get_input_embeddings().weight.copy_(torch.eye(CHAIN_VOCAB))
        lm_head = model.get_output_embeddings().weight
        for token in range(CHAIN_VOCAB):
            lm_head[targets.get(token, CHAIN_END), token] = 1.0
    return model


def build_flat(**config: Any) -> PreTrainedModel:
    """FX-FLAT: FX-CHAIN with a zero output matrix, so that all logits are equal."""
    model = build_chain(**config)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    return model


def chain_text(text: str, last: int = CHAIN_END) -> dict[int, int]:
    """Return the look-up that spells `text` byte by byte, then `last`.

    Args:
        text: each byte may occur once only, for a byte leads to one place.
    """
    data = list(text.encode())
    assert len(set(data)) == len(data), "a byte that occurs twice would lead to two places"
    return dict(zip(data, [*data[1:], last], strict=True))


def build_chain_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of FX-CHAIN: bytes 0-255, seven merges, three special tokens; 266 in all."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    vocab = {letters[byte]: byte for byte in range(256)}
    merges = []
    for merged in _CHAIN_MERGES:
        merges.append((merged[:-1], merged[-1]))
        vocab[merged] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in _CHAIN_SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    if chat_template is not None:
        fast.chat_template = chat_template
    return fast


def save_checkpoint(
    model: PreTrainedModel,
    directory: Path,
    tokenizer: PreTrainedTokenizerFast | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write config, weights (safetensors) and tokenizer into `directory` and return it."""
    saved = model if dtype is None else model.to(dtype)
    saved.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return directory
