"""Model shapes that the GPU benchmarks run with made-up weights.

Each is a config.json and nothing else. The sizes are those of known models: Qwen2.5 7B, Gemma 3 4B,
Nemotron-H 8B and DeepSeek-V2-Lite as published, a small Qwen3-Next, and a Qwen2 of which half the
layers have a window (which vLLM 0.24 refuses).

    python benchmarks/engine/shapes.py DIR      # writes DIR/<name>/config.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {"torch_dtype": "bfloat16", "rms_norm_eps": 1e-6}
_QWEN: dict[str, Any] = {
    **_COMMON,
    "hidden_act": "silu",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "tie_word_embeddings": False,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-7b": {
        **_QWEN,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "use_sliding_window": False,
    },
    "qwen2-hybrid": {
        **_QWEN,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "use_sliding_window": True,
        "sliding_window": 2048,
        "max_window_layers": 16,
        "layer_types": ["full_attention"] * 16 + ["sliding_attention"] * 16,
    },
    "gemma3-4b": {
        **_COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 1024,
        "query_pre_attn_scalar": 256,
        "layer_types": [
            "full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(34)
        ],
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    "qwen3-next-small": {
        **_QWEN,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 151936,
        "max_position_embeddings": 65536,
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "layer_types": [
            "full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(24)
        ],
    },
    "nemotron-h-8b": {
        **_COMMON,
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_head_dim": 128,
        "vocab_size": 131072,
        "max_position_embeddings": 65536,
        "layer_norm_epsilon": 1e-5,
        "rms_norm_eps": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_groups": 8,
        "expand": 2,
        "chunk_size": 128,
        "use_conv_bias": True,
        "mamba_proj_bias": False,
        "use_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "mamba_hidden_act": "silu",
        "time_step_limit": [0.0, 1e30],
        "residual_in_fp32": False,
        "rescale_prenorm_residual": True,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "deepseek-v2-lite": {
        **_COMMON,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 102400,
        "max_position_embeddings": 32768,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
    },
}


def write_shape(name: str, directory: Path) -> Path:
    """Write one shape's config and return the model directory."""
    target = directory / name
    target.mkdir(parents=True, exist_ok=True)
    config = SHAPES[name]
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (target / "generation_config.json").write_text(json.dumps(ends) + "\n")
    return target


def write_tokenizer(name: str, directory: Path) -> None:
    """Write a tokenizer into a shape's directory, for servers: each token of a text is a byte.

    Byte-level pairs without a merge, since families insist on classes of their own that are made of
    such pairs. The other ids, which made-up weights draw, are written as numbers.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = [f"Ġ{i}" for i in range(len(letters), SHAPES[name]["vocab_size"])]  # Ġ is a space
    vocab = {token: i for i, token in enumerate(letters + numbers)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")


if __name__ == "__main__":
    for each in SHAPES:
        print(write_shape(each, Path(sys.argv[1])))
