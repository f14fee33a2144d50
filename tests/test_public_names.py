"""Every public name imports from its 0.6.3 path, and `import vllm` stays light."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time

import pytest

import vllm

EXPORTS = [
    "__version__",
    "__version_tuple__",
    "LLM",
    "ModelRegistry",
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
    "SamplingParams",
    "RequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LLMEngine",
    "EngineArgs",
    "AsyncLLMEngine",
    "AsyncEngineArgs",
    "initialize_ray_cluster",
    "PoolingParams",
]

PATHS = {
    "vllm.attention": ["Attention"],
    "vllm.beam_search": ["BeamSearchOutput", "BeamSearchSequence", "BeamSearchInstance"],
    "vllm.config": [
        "ModelConfig",
        "CacheConfig",
        "ParallelConfig",
        "SchedulerConfig",
        "DeviceConfig",
        "LoadConfig",
        "LoadFormat",
        "TokenizerPoolConfig",
        "SpeculativeConfig",
        "LoRAConfig",
        "PromptAdapterConfig",
        "MultiModalConfig",
        "DecodingConfig",
        "ObservabilityConfig",
        "EngineConfig",
    ],
    "vllm.engine.arg_utils": ["EngineArgs", "AsyncEngineArgs", "StoreBoolean"],
    "vllm.engine.async_llm_engine": ["AsyncLLMEngine", "AsyncEngineDeadError"],
    "vllm.engine.llm_engine": ["LLMEngine"],
    "vllm.engine.metrics": ["LoggingStatLogger", "PrometheusStatLogger", "StatLoggerBase", "Stats"],
    "vllm.engine.multiprocessing": [
        "MQLLMEngineClient",
        "MQLLMEngine",
        "run_mp_engine",
        "MQEngineDeadError",
    ],
    "vllm.engine.protocol": ["EngineClient"],
    "vllm.entrypoints.chat_utils": [
        "apply_hf_chat_template",
        "load_chat_template",
        "parse_chat_messages",
    ],
    "vllm.entrypoints.llm": ["LLM"],
    "vllm.entrypoints.openai.tool_parsers": ["ToolParser", "ToolParserManager"],
    "vllm.executor.ray_utils": ["initialize_ray_cluster"],
    "vllm.inputs": [
        "TextPrompt",
        "TokensPrompt",
        "PromptType",
        "ExplicitEncoderDecoderPrompt",
        "INPUT_REGISTRY",
    ],
    "vllm.logger": ["init_logger"],
    "vllm.lora.request": ["LoRARequest"],
    "vllm.prompt_adapter.request": ["PromptAdapterRequest"],
    "vllm.model_executor.models": ["ModelRegistry"],
    "vllm.model_executor.layers.activation": ["SiluAndMul", "GeluAndMul", "get_act_fn"],
    "vllm.model_executor.layers.fused_moe": ["FusedMoE"],
    "vllm.model_executor.layers.layernorm": ["RMSNorm"],
    "vllm.model_executor.layers.linear": [
        "ColumnParallelLinear",
        "RowParallelLinear",
        "MergedColumnParallelLinear",
        "QKVParallelLinear",
        "ReplicatedLinear",
    ],
    "vllm.model_executor.layers.logits_processor": ["LogitsProcessor"],
    "vllm.model_executor.layers.pooler": ["Pooler"],
    "vllm.model_executor.layers.rotary_embedding": ["get_rope"],
    "vllm.model_executor.layers.sampler": ["Sampler"],
    "vllm.model_executor.layers.vocab_parallel_embedding": [
        "VocabParallelEmbedding",
        "ParallelLMHead",
    ],
    "vllm.outputs": [
        "RequestOutput",
        "CompletionOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "RequestOutputFactory",
    ],
    "vllm.platforms": ["current_platform"],
    "vllm.plugins": ["load_general_plugins", "set_torch_compile_backend"],
    "vllm.pooling_params": ["PoolingParams"],
    "vllm.sampling_params": [
        "SamplingParams",
        "BeamSearchParams",
        "GuidedDecodingParams",
        "RequestOutputKind",
        "SamplingType",
        "LogitsProcessor",
    ],
    "vllm.scalar_type": ["scalar_types"],
    "vllm.sequence": ["Logprob", "RequestMetrics"],
    "vllm.usage.usage_lib": ["UsageContext"],
    "vllm.utils": ["FlexibleArgumentParser", "Counter", "random_uuid"],
}


def test_exports() -> None:
    assert sorted(vllm.__all__) == sorted(EXPORTS)
    for name in EXPORTS:
        assert getattr(vllm, name) is not None
    assert vllm.__version__.startswith("0.6.3+hybrid.")
    assert set(EXPORTS) <= set(dir(vllm))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = vllm.nonsense


@pytest.mark.parametrize("module", PATHS)
def test_paths(module: str) -> None:
    loaded = importlib.import_module(module)
    for name in PATHS[module]:
        assert getattr(loaded, name) is not None


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_fast_and_light() -> None:
    times = []
    for _ in range(3):
        started_s = time.perf_counter()
        loaded = run_python(
            "import sys, vllm\nfrom vllm import SamplingParams, TokensPrompt\n"
            "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
        )
        times.append(time.perf_counter() - started_s)
        assert loaded == "[]"
    assert min(times) < 0.5


@pytest.mark.parametrize(
    "module",
    [
        "vllm.engine.async_llm_engine",
        "vllm.engine.client",
        "vllm.engine.messages",
        "vllm.engine.core",
    ],
)
def test_the_api_side_imports_no_torch(module: str) -> None:
    assert run_python(f"import sys, {module}\nprint('torch' in sys.modules)") == "False"


def test_windows_is_told_where_to_go() -> None:
    message = run_python(
        "import sys\nsys.platform = 'win32'\n"
        "try:\n    import vllm\nexcept ImportError as error:\n    print(error)"
    )
    assert "WSL2" in message
    assert "Ubuntu 22.04" in message


def test_what_is_out_of_scope_says_so() -> None:
    from vllm.config import LoRAConfig
    from vllm.errors import ConfigError
    from vllm.inputs import INPUT_REGISTRY
    from vllm.model_executor.layers.pooler import Pooler, PoolingType

    with pytest.raises(ConfigError, match="LoRA adapters are not served"):
        LoRAConfig()
    with pytest.raises(ConfigError, match="Ray clusters are not served"):
        vllm.initialize_ray_cluster(None)
    with pytest.raises(NotImplementedError, match="multimodal"):
        INPUT_REGISTRY.register_dummy_data(None)
    with pytest.raises(ConfigError, match="embedding"):
        Pooler(PoolingType.LAST, normalize=True)
    with pytest.raises(NotImplementedError, match=r"torch\.compile"):
        from vllm.plugins import set_torch_compile_backend

        set_torch_compile_backend("inductor")


def test_scalar_types() -> None:
    from vllm.scalar_type import scalar_types

    sizes = {
        "int4": 4,
        "uint4": 4,
        "int8": 8,
        "uint8": 8,
        "float8_e4m3fn": 8,
        "float8_e5m2": 8,
        "float16_e8m7": 16,
        "float16_e5m10": 16,
        "float6_e3m2f": 6,
        "uint4b8": 4,
        "uint8b128": 8,
    }
    assert {name: getattr(scalar_types, name).size_bits for name in sizes} == sizes
    assert (scalar_types.int4.min(), scalar_types.int4.max()) == (-8, 7)
    assert (scalar_types.uint4b8.min(), scalar_types.uint4b8.max()) == (-8, 7)
    assert scalar_types.float8_e4m3fn.max() == 448
    assert scalar_types.float8_e5m2.max() == 57344
    assert scalar_types.float16_e5m10.max() == 65504
