"""The frozen list of flags, and the way from a command line to a resolved configuration."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from tests.utils.tiny_models import TinyModels
from vllm import LLM, AsyncEngineArgs, EngineArgs
from vllm.config import DummyConfig, EngineConfig
from vllm.config.resolve import _resolve_scheduler
from vllm.errors import ConfigError
from vllm.types import DType
from vllm.utils import FlexibleArgumentParser

# Every engine flag of 0.6.3 (surface/cli.md section 3). A flag may be added here, never taken away.
FROZEN_FLAGS = """
--model --served-model-name --tokenizer --skip-tokenizer-init --revision --code-revision
--tokenizer-revision --tokenizer-mode --trust-remote-code --download-dir --load-format
--config-format --dtype --kv-cache-dtype --quantization-param-path --max-model-len --quantization
--rope-scaling --rope-theta --model-loader-extra-config --ignore-patterns --seed --max-logprobs
--guided-decoding-backend --qlora-adapter-name-or-path --device --tensor-parallel-size
--pipeline-parallel-size --distributed-executor-backend --worker-use-ray
--max-parallel-loading-workers --ray-workers-use-nsight --disable-custom-all-reduce
--override-neuron-config --block-size --gpu-memory-utilization --swap-space --cpu-offload-gb
--num-gpu-blocks-override --enable-prefix-caching --disable-sliding-window --use-v2-block-manager
--num-lookahead-slots --max-num-seqs --max-num-batched-tokens --enable-chunked-prefill
--scheduling-policy --scheduler-delay-factor --preemption-mode --num-scheduler-steps
--multi-step-stream-outputs --disable-async-output-proc --enforce-eager --max-seq-len-to-capture
--max-context-len-to-capture --tokenizer-pool-size --tokenizer-pool-type
--tokenizer-pool-extra-config --limit-mm-per-prompt --mm-processor-kwargs --enable-lora --max-loras
--max-lora-rank --lora-extra-vocab-size --lora-dtype --long-lora-scaling-factors --max-cpu-loras
--fully-sharded-loras --enable-prompt-adapter --max-prompt-adapters --max-prompt-adapter-token
--speculative-model --speculative-model-quantization --num-speculative-tokens
--speculative-disable-mqa-scorer --speculative-draft-tensor-parallel-size
--speculative-max-model-len --speculative-disable-by-batch-size --ngram-prompt-lookup-max
--ngram-prompt-lookup-min --spec-decoding-acceptance-method
--typical-acceptance-sampler-posterior-threshold --typical-acceptance-sampler-posterior-alpha
--disable-logprobs-during-spec-decoding --disable-log-stats --otlp-traces-endpoint
--collect-detailed-traces --disable-log-requests --hybrid-mode --hybrid-config --hybrid-strict
--mamba-ssm-cache-dtype --trace-level
"""
SHORT = {"-q", "-tp", "-pp", "-spec-draft-tp", "-h", "--help"}


def make_parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog="engine")
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def parse(*args: str) -> AsyncEngineArgs:
    return AsyncEngineArgs.from_cli_args(make_parser().parse_args(args))


def test_flags_are_frozen() -> None:
    known = {o for o in make_parser()._option_string_actions if not o.startswith("--no-")}
    assert known - SHORT == set(FROZEN_FLAGS.split())
    assert known >= SHORT


def test_flags_and_fields_are_one() -> None:
    names = {"--" + f.name.replace("_", "-") for f in fields(AsyncEngineArgs)}
    assert names == set(FROZEN_FLAGS.split())
    assert parse() == AsyncEngineArgs(), "the same defaults in Python and on the command line"
    only = FlexibleArgumentParser()
    AsyncEngineArgs.add_cli_args(only, async_args_only=True)
    assert only.parse_args(["--disable-log-requests"]).disable_log_requests


def test_help_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    for title in ("Model, tokenizer, weights:", "KV cache and memory:", "Scheduling:"):
        assert title in text
    assert "(default: 256)" in text


def test_values() -> None:
    args = parse(
        "--max_model_len", "64", "-tp", "2", "--served-model-name", "a", "b", "--rope-scaling",
        '{"rope_type": "linear", "factor": 2.0}', "--enable-chunked-prefill=false",
        "--no-enable-prefix-caching", "--enforce-eager", "--ignore-patterns", "x",
        "--ignore-patterns", "y",
    )  # fmt: skip
    assert (args.max_model_len, args.tensor_parallel_size) == (64, 2)
    assert args.served_model_name == ["a", "b"]
    assert args.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert args.enable_chunked_prefill is False
    assert args.enable_prefix_caching is False
    assert args.enforce_eager is True
    assert args.ignore_patterns == ["x", "y"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dtype", "int4"], "invalid choice"),
        (["--block-size", "7"], "invalid choice"),
        (["--rope-scaling", "{"], "expected a JSON object"),
        (["--max-num-seq", "3", "--max-num-sequences", "4"], "did you mean --max-num-seqs?"),
    ],
)
def test_wrong_flags(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*args)
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> Path:
    return tiny_models.loop()


def resolve(model: Path, **options) -> EngineConfig:
    return EngineArgs(model=str(model), **options).create_engine_config()


def test_defaults(model: Path) -> None:
    config = resolve(model)
    assert config.device_config.device == "cpu"
    assert config.model_config.dtype is DType.FLOAT32, "what the checkpoint has"
    assert config.model_config.max_model_len == 512
    assert config.model_config.served_model_names == (str(model),)
    assert config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_batched_tokens == 512
    assert config.scheduler_config.max_num_seqs == 256
    assert config.cache_config.enable_prefix_caching
    assert config.cache_config.block_size == 16
    assert config.parallel_config.distributed_executor_backend is None
    assert config.observability_config.log_stats


def test_model_config_answers(model: Path) -> None:
    config = resolve(model, served_model_name=["first", "second"])
    made = config.model_config
    assert made.served_model_name == "first"
    assert (made.get_vocab_size(), made.get_hidden_size(), made.get_head_size()) == (320, 320, 64)
    assert made.get_total_num_kv_heads() == 2
    assert made.get_num_kv_heads(config.parallel_config) == 2
    assert made.get_num_attention_heads(config.parallel_config) == 4
    assert made.get_num_layers(config.parallel_config) == 2
    assert made.get_sliding_window() is None
    assert not made.embedding_mode
    assert made.quantization is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"enable_chunked_prefill": False}, (2048, 256)),
        ({"max_num_batched_tokens": 64}, (64, 64)),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 8}, (64, 8)),
        ({"max_num_seqs": 4}, (512, 4)),
    ],
)
def test_budgets(model: Path, options: dict, expected: tuple[int, int]) -> None:
    scheduler = resolve(model, **options).scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == expected


@pytest.mark.parametrize(
    ("kind", "gib", "options", "expected"),
    [
        (EngineArgs, 80, {}, (16384 + 256, 256)),
        (EngineArgs, 24, {}, (8192 + 256, 256)),
        (AsyncEngineArgs, 80, {}, (8192 + 256, 256)),
        (EngineArgs, 80, {"max_num_seqs": 4}, (16384 + 4, 4)),
        (EngineArgs, 80, {"max_num_batched_tokens": 64}, (64, 64)),
        (EngineArgs, 80, {"enable_chunked_prefill": False}, (2048, 256)),
    ],
)
def test_budgets_on_a_gpu(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[EngineArgs],
    gib: int,
    options: dict,
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr("vllm.config.resolve.find_gpu_bytes", lambda: gib << 30)
    args = kind(model=str(model), **options)
    scheduler = _resolve_scheduler(args, resolve(model).model_config, "cuda")
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == expected


def test_dtype_and_lengths(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(model, dtype="bfloat16").model_config.dtype is DType.BFLOAT16
    assert resolve(model, dtype="half").model_config.dtype is DType.BFLOAT16, "on a CPU"
    assert resolve(model, max_model_len=100).model_config.max_model_len == 100
    scaling = {"rope_type": "linear", "factor": 2.0}
    scaled = resolve(model, rope_scaling=scaling, rope_theta=5000.0).model_config
    assert scaled.max_model_len == 1024
    assert scaled.hf_config["rope_parameters"]["rope_theta"] == 5000.0
    with pytest.raises(ConfigError, match="exceeds the 512 tokens"):
        resolve(model, max_model_len=1000)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert resolve(model, max_model_len=1000).model_config.max_model_len == 1000


def test_rope_of_layer_types(tiny_models: TinyModels) -> None:
    gemma = tiny_models.reach("gemma3_text", sliding_window=20)
    changed = resolve(gemma, rope_theta=7.0).model_config.hf_config["rope_parameters"]
    assert changed["full_attention"]["rope_theta"] == 7.0
    assert changed["sliding_attention"]["rope_theta"] != 7.0
    assert resolve(gemma).model_config.max_model_len == 512, "a window is no limit (case C03)"
    assert resolve(gemma, disable_sliding_window=True).model_config.max_model_len == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device 'tpu' is not served"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"max_model_len": 1}, "at least 2"),
        ({"quantization": "awq"}, "quantization 'awq'"),
        ({"quantization": "gguf"}, "does not fit"),
        ({"load_format": "tensorizer"}, "load_format 'tensorizer'"),
        ({"load_format": "dummy", "model_loader_extra_config": "{"}, "no JSON"),
        ({"load_format": "dummy", "model_loader_extra_config": "[]"}, "keys range, norms and seed"),
        (
            {"load_format": "dummy", "model_loader_extra_config": {"std": 1}},
            "keys range, norms and seed",
        ),
        ({"load_format": "dummy", "model_loader_extra_config": {"range": 0}}, "above 0"),
        ({"load_format": "dummy", "model_loader_extra_config": {"range": "1"}}, "above 0"),
        ({"load_format": "dummy", "model_loader_extra_config": {"norms": "two"}}, "allowed: one"),
        ({"load_format": "dummy", "model_loader_extra_config": {"seed": 1}}, "allowed: one"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, "below max_model_len"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "below max_num_seqs"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"scheduling_policy": "random"}, "allowed: fcfs, priority"),
        ({"scheduler_delay_factor": -1.0}, "may not be negative"),
        ({"scheduler_delay_factor": float("nan")}, "must be a number"),
        ({"rope_theta": 0.0}, "above 0"),
        ({"rope_theta": float("nan")}, "above 0"),
        ({"gpu_memory_utilization": 1.5}, "above 0 and at most 1"),
        ({"gpu_memory_utilization": 0.0}, "above 0 and at most 1"),
        ({"num_gpu_blocks_override": 0}, "at least 1"),
        ({"block_size": 0}, "at least 1"),
        ({"kv_cache_dtype": "fp8"}, "allowed: auto"),
        ({"tensor_parallel_size": 3}, "does not divide the model's 4"),
        ({"tensor_parallel_size": 0}, "at least 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 1"),
        ({"distributed_executor_backend": "ray"}, "'ray' is not served"),
        ({"worker_use_ray": True}, "'ray' is not served"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"enable_prompt_adapter": True}, "--enable-prompt-adapter"),
        ({"speculative_model": "[ngram]"}, "--speculative-model"),
        ({"num_speculative_tokens": 3}, "--speculative-model"),
        ({"max_context_len_to_capture": 9}, "replaced by max_seq_len_to_capture"),
        ({"limit_mm_per_prompt": {"image": 1}}, "only text models"),
        ({"otlp_traces_endpoint": "x"}, "traces"),
        ({"cpu_offload_gb": 1}, "--cpu-offload-gb"),
        ({"swap_space": -1}, "--swap-space"),
        ({"tokenizer_mode": "mistral"}, "--tokenizer-mode"),
        ({"max_logprobs": -1}, "--max-logprobs"),
    ],
)
def test_what_cannot_be_served_is_said(model: Path, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(model, **options)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"swap_space": 8}, "--swap-space"),
        ({"preemption_mode": "swap"}, "--preemption-mode"),
        ({"num_scheduler_steps": 8}, "--num-scheduler-steps"),
        ({"multi_step_stream_outputs": False}, "--multi-step-stream-outputs"),
        ({"use_v2_block_manager": False}, "--use-v2-block-manager"),
        ({"num_lookahead_slots": 2}, "--num-lookahead-slots"),
        ({"max_seq_len_to_capture": 4096}, "--max-seq-len-to-capture"),
        ({"guided_decoding_backend": "outlines"}, "--guided-decoding-backend"),
        ({"code_revision": "main"}, "--code-revision"),
        ({"tokenizer_pool_size": 2}, "--tokenizer-pool-size"),
        ({"model_loader_extra_config": {"range": 1}}, "--model-loader-extra-config"),
    ],
)
def test_what_has_no_effect_is_said_once(
    model: Path, options: dict, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import accepted

    said: list[str] = []
    monkeypatch.setattr(accepted, "warn_once", lambda _, message: said.append(message))
    resolve(model, **options)
    assert len(said) == 1
    assert said[0].startswith(f"{flag} is accepted and has no effect")
    said.clear()
    resolve(model, swap_space=4, use_v2_block_manager=True)
    assert said == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, DummyConfig()),
        ({"norms": "one"}, DummyConfig(has_random_norms=False)),
        (
            '{"range": 0.035, "norms": "one", "seed": "name"}',
            DummyConfig(value_range=0.035, has_random_norms=False, has_one_seed=False),
        ),
        ('{"range": 1, "norms": "random", "seed": "one"}', DummyConfig(value_range=1.0)),
    ],
)
def test_made_up_weights(model: Path, options: dict | str | None, expected: DummyConfig) -> None:
    found = resolve(model, load_format="dummy", model_loader_extra_config=options).load_config
    assert found.dummy == expected


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "rope_scaling": {"type": "longrope"},
            "quantization_config": {"quant_method": "awq"},
        },
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "text_config": {"model_type": "llama"},
        },
        {"model_type": "phi3"},
    ],
)
def test_the_family_is_judged_first(tmp_path: Path, config: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = (config.get("architectures") or [""])[0]
    for make in (LLM, lambda model: EngineArgs(model).create_engine_config()):
        with pytest.raises(ConfigError, match=rf"{name}.* not supported; .*, LlamaForCausalLM, "):
            make(str(tmp_path))


def test_a_family_without_class_names_is_known_by_its_type(tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = EngineArgs(str(tmp_path), skip_tokenizer_init=True).create_engine_config()
    assert made.model_config.architectures == ("LlamaForCausalLM",)


def test_gguf(smollm2_gguf: Path) -> None:
    config = resolve(smollm2_gguf)
    assert config.load_config.load_format == "gguf"
    assert config.model_config.dtype is DType.BFLOAT16
    assert config.model_config.max_model_len == 8192
    assert resolve(smollm2_gguf, quantization="gguf") == config
    with pytest.raises(ConfigError, match="is a GGUF file, but load_format"):
        resolve(smollm2_gguf, load_format="safetensors")


def test_plugins_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from vllm import plugins

    calls: list[str] = []
    monkeypatch.setattr(plugins, "_loaded", set())
    points = [
        EntryPoint(name=name, value="tests.engine.plugin_stub:" + name, group=plugins.GROUP)
        for name in ("works", "fails")
    ]
    monkeypatch.setattr(EntryPoint, "load", lambda self: _stub(self.name, calls))
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    EngineArgs()
    EngineArgs()
    assert calls == ["works", "fails"]
    calls.clear()
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.setenv("VLLM_PLUGINS", "works")
    EngineArgs()
    assert calls == ["works"]


def _stub(name: str, calls: list[str]):
    def plugin() -> None:
        calls.append(name)
        if name == "fails":
            raise RuntimeError("foreign code")

    return plugin
