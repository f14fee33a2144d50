"""Which class serves which architecture name. A new model is a file and a row here.

Read by the registry. Modules are imported when a model is asked for; importing this file imports
none.
"""

from __future__ import annotations

_PACKAGE = "vllm.model_executor.models"

ARCHITECTURES: dict[str, str] = {
    name: f"{_PACKAGE}.{place}"
    for name, place in {
        "AquilaForCausalLM": "llama:LlamaForCausalLM",
        "AquilaModel": "llama:LlamaForCausalLM",
        "BambaForCausalLM": "bamba:BambaForCausalLM",
        "DeepseekV2ForCausalLM": "deepseek_v2:DeepseekV2ForCausalLM",
        "Gemma2ForCausalLM": "gemma2:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "gemma3:Gemma3ForCausalLM",
        "Gemma3nForCausalLM": "gemma3n:Gemma3nForCausalLM",
        "GemmaForCausalLM": "gemma:GemmaForCausalLM",
        "GptOssForCausalLM": "gpt_oss:GptOssForCausalLM",
        "GraniteMoeHybridForCausalLM": "granite_hybrid:GraniteMoeHybridForCausalLM",
        "InternLMForCausalLM": "llama:LlamaForCausalLM",
        "LLaMAForCausalLM": "llama:LlamaForCausalLM",
        "Lfm2ForCausalLM": "lfm2:Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM": "lfm2:Lfm2MoeForCausalLM",
        "Llama4ForCausalLM": "llama4:Llama4ForCausalLM",
        "LlamaForCausalLM": "llama:LlamaForCausalLM",
        "MistralForCausalLM": "llama:MistralForCausalLM",
        "MixtralForCausalLM": "mixtral:MixtralForCausalLM",
        "NemotronHForCausalLM": "nemotron_h:NemotronHForCausalLM",
        "Qwen2ForCausalLM": "qwen2:Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM": "qwen2_moe:Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM": "qwen3:Qwen3ForCausalLM",
        "Qwen3NextForCausalLM": "qwen3_next:Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM": "qwen3_5:Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM": "qwen3_5:Qwen3_5MoeForCausalLM",
    }.items()
}
