"""Rules of hybrid configuration: each breach is refused, and names what is at fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hybrid.engines import write_json
from vllm.cache_spec import Chunk, Full, Nothing, State, Window
from vllm.config.hybrid import HybridConfig, HybridSettings, load_hybrid_file
from vllm.errors import ConfigError
from vllm.hybrid.resolve import resolve_hybrid

LAYERS = {"full": [0, 1], "flash3": [2, 3], "dense_head": [4]}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "layer_types": ["full_attention"] * 4,
    "hybrid_attention_layers": LAYERS,
}
MISSION: dict[str, Any] = {
    "block_size_map": {"full": 16, "flash3": 8, "dense_head": 0},
    "layer_impl_map": {"full": "flashattn", "flash3": "flashattn3", "dense_head": "torch"},
    "kv_cache_ratio": {"full": 1.0, "flash3": 0.35, "dense_head": 0.0},
}
SLIDING = {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2, "sliding_window": 32}


def resolve(
    tmp_path: Path,
    content: Any = None,
    config: dict[str, Any] | None = None,
    max_model_len: int = 1000,
    **flags: Any,
) -> HybridSettings:
    file = None if content is None else write_json(tmp_path / "hybrid.json", content)
    return resolve_hybrid(QWEN2 if config is None else config, max_model_len, file=file, **flags)


def test_the_mission_example(tmp_path: Path) -> None:
    settings = resolve(tmp_path, MISSION, mode=True)
    assert settings.policies is not None
    full, flash3 = settings.policies[0], settings.policies[2]
    assert (full.kind, full.lifetime, full.block_tokens, full.kernel) == (
        "full", Full(), 16, "flashattn",
    )  # fmt: skip
    assert (flash3.kind, flash3.lifetime, flash3.block_tokens, flash3.kernel) == (
        "flash3", Window(tokens=350), 8, "flashattn3",
    )  # fmt: skip
    assert [p.is_reduced for p in settings.policies] == [False, False, True, True]
    assert settings.block_size_map(16) == {"full": 16, "flash3": 8}
    assert settings.block_sizes == (8, 16)
    assert settings.uncached_types == ("dense_head",)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"full": [0, 1], "flash3": [3]}, r"does not list the layers \[2\]"),
        ({"full": [0, 1, 2], "flash3": [2, 3]}, "layer 2 under 'full' and 'flash3'"),
        ({"full": [0, 0, 1, 2, 3]}, "layer 0 under 'full' and 'full'"),
        ({"full": [0, 1, 2, 3, -1]}, "lists -1 under 'full'"),
        ({"full": [0, 1, 2, "3"]}, "lists '3' under 'full'"),
        ({"full": [0, 1, 2, True]}, "lists True under 'full'"),
        ({"full": "0123"}, "a list of layer ids is needed"),
        ([0, 1, 2, 3], "must map layer types to lists"),
    ],
)
def test_wrong_layers(tmp_path: Path, layers: Any, message: str) -> None:
    config = {**QWEN2, "hybrid_attention_layers": layers}
    with pytest.raises(ConfigError, match=message):
        resolve(tmp_path, config=config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"block_size_map": {"dense_head": 16}}, r"lists \[4\], modules after the 4 decoder"),
        (
            {"kv_cache_ratio": {"dense_head": 0.5}},
            r"lists \[4\].*kv_cache_ratio must be 0, not 0.5",
        ),
        ({"block_size_map": {"flash3": 0}}, "layer 2 is of type 'flash3', which is given no cache"),
        ({"kv_cache_ratio": {"full": 0.0}}, "layer 0 is of type 'full', which is given no cache"),
        ({"block_size_map": {"full": 2000}}, "block size 2000; allowed: 0"),
        ({"block_size_map": {"full": -1}}, "block size -1"),
        ({"block_size_map": {"full": 8.5}}, "block size 8.5"),
        ({"block_size_map": {"ful": 8}}, "'ful', which this model does not have.*mean 'full'"),
        ({"layer_impl_map": {"full": "flash_attn"}}, "'flash_attn'; allowed.*mean 'flashattn'"),
        ({"kv_cache_ratio": {"full": 1.5}}, "ratio 1.5; allowed: 0 .* to 1"),
        ({"kv_cache_ratio": {"full": "1"}}, "ratio '1'"),
        ({"kv_sink_tokens": {"full": -4}}, "value -4; a number of tokens"),
        ({"block_size": {"full": 8}}, "key 'block_size'; allowed.*mean 'block_size_map'"),
        ({"block_size_map": 16}, "'block_size_map' must map layer types to values"),
        ([1], "holds a list; expected an object"),
    ],
)
def test_wrong_files(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(tmp_path, content)


def test_a_type_may_not_mix_decoder_layers_with_what_follows(tmp_path: Path) -> None:
    config = {**QWEN2, "hybrid_attention_layers": {"full": [0, 1, 2, 3, 4]}}
    with pytest.raises(ConfigError, match=r"mixes decoder layers with modules .*\(\[4\]\)"):
        resolve(tmp_path, config=config)


def test_a_file_that_is_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_hybrid_file(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_hybrid_file(tmp_path / "text.json")


def test_the_file_may_name_layers_and_wins_over_the_checkpoint(tmp_path: Path) -> None:
    content = {"hybrid_attention_layers": {"a": [0, 2], "b": [1, 3]}, "block_size_map": {"a": 32}}
    settings = resolve(tmp_path, content)
    assert settings.policies is not None
    assert [p.kind for p in settings.policies] == ["a", "b", "a", "b"]
    assert settings.block_size_map(16) == {"a": 32, "b": 16}
    unnamed = {k: v for k, v in QWEN2.items() if k != "hybrid_attention_layers"}
    assert resolve(tmp_path, content, unnamed).policies == settings.policies


def test_a_window_of_the_checkpoint_wins_over_a_ratio(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = resolve(
        tmp_path, {"kv_cache_ratio": {"flash3": 0.5}}, {**QWEN2, **SLIDING}, max_model_len=999
    )
    assert settings.policies is not None
    assert settings.policies[2].lifetime == Window(tokens=32)
    assert not settings.policies[2].is_reduced
    assert "no effect on the layers [2, 3]" in caplog.text


def test_ratios_round_up_and_sinks_are_kept(tmp_path: Path) -> None:
    content = {"kv_cache_ratio": {"flash3": 0.35}, "kv_sink_tokens": {"flash3": 4}}
    settings = resolve(tmp_path, content, max_model_len=333)
    assert settings.policies is not None
    assert settings.policies[3].lifetime == Window(tokens=117, sinks=4)
    tiny = resolve(tmp_path, {"kv_cache_ratio": {"flash3": 1e-9}})
    assert tiny.policies is not None
    assert tiny.policies[3].lifetime == Window(tokens=1)


def test_auto_is_on_where_the_checkpoint_forgets() -> None:
    uniform = {"model_type": "qwen2", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    assert resolve_hybrid(uniform, 100).policies is None
    asked = resolve_hybrid(uniform, 100, mode=True)
    assert [p.kind for p in asked.policies or ()] == ["full", "full"]
    sliding = {
        "model_type": "gemma2", "num_hidden_layers": 2, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    found = resolve_hybrid(sliding, 100)
    assert [p.kind for p in found.policies or ()] == ["window_8", "full"]
    assert found.block_size_map(16) == {"window_8": 16, "full": 16}
    vanilla = resolve_hybrid(sliding, 100, mode=False)
    assert vanilla.policies is None
    assert vanilla.is_vanilla


def test_a_family_of_the_users_own_is_left_alone() -> None:
    own = {"model_type": "toy", "num_hidden_layers": 2, "sliding_window": 8}
    assert resolve_hybrid(own, 100).policies is None


def test_vanilla_refuses_states_by_layer() -> None:
    config = {
        "model_type": "qwen3_next", "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"--hybrid-mode false.*\[0, 1, 2\] keep a state"):
        resolve_hybrid(config, 100, mode=False)
    settings = resolve_hybrid(config, 100)
    assert [p.lifetime for p in settings.policies or ()] == [State()] * 3 + [Full()]
    assert settings.block_size_map(16) == {"full": 16}, "a state has no block of tokens"


def test_layers_without_a_cache_may_be_given_none(tmp_path: Path) -> None:
    config = {
        "model_type": "nemotron_h", "num_hidden_layers": 3, "hybrid_override_pattern": "M-*",
        "hybrid_attention_layers": {"mamba": [0], "mlp": [1], "attention": [2]},
    }  # fmt: skip
    settings = resolve(tmp_path, {"block_size_map": {"mlp": 0, "attention": 32}}, config)
    assert [p.lifetime for p in settings.policies or ()] == [State(), Nothing(), Full()]
    assert settings.block_size_map(16) == {"attention": 32}
    with pytest.raises(ConfigError, match=r"layer 0 is of type 'mamba'.*keeps a state"):
        resolve(tmp_path, {"block_size_map": {"mamba": 0}}, config)


def test_a_reader_keeps_what_its_owner_keeps(tmp_path: Path) -> None:
    """Windows of such models keep one row more, for readers that are run when it is written."""
    config = {
        "model_type": "gemma3n_text", "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
        "hybrid_attention_layers": {"own": [0, 1], "shared": [2, 3]},
    }  # fmt: skip
    settings = resolve(tmp_path, {"kv_cache_ratio": {"own": 0.1}}, config)
    assert [(p.reads_from, p.lifetime) for p in settings.policies or ()] == [
        (None, Window(tokens=9)),
        (None, Window(tokens=100)),
        (0, Window(tokens=9)),
        (1, Window(tokens=100)),
    ]
    assert settings.block_size_map(16) == {"own": 16}


def test_a_reader_reads_the_last_layer_of_its_type(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"] * 3
    config = {
        "model_type": "gemma3n_text", "num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "layer_types": types, "sliding_window": 8,
    }  # fmt: skip
    settings = resolve(tmp_path, {}, config)
    assert [p.reads_from for p in settings.policies or ()] == [None] * 4 + [2, 3]


@pytest.mark.parametrize(
    ("model_type", "field"),
    [
        ("longcat_flash", "num_layers"),  # two caches in a layer (trap 33)
        ("inkling_text", "number_of_conv_states"),  # rows and a state in a layer
        ("deepseek_v4", "compress_ratios"),  # state beside the rows (trap 27)
        ("qwen4_exp", "indexer_budget"),
    ],
)
def test_a_memory_that_the_engine_lacks_is_refused(
    tmp_path: Path, model_type: str, field: str
) -> None:
    config = {"model_type": model_type, "num_hidden_layers": 4}
    with pytest.raises(ConfigError, match=f"'{model_type}' cannot be served: its `{field}`"):
        resolve(tmp_path, {}, config)


def test_chunks_are_read_from_the_checkpoint() -> None:
    config = {"model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": 64}
    settings = resolve_hybrid(config, 1000)
    assert [p.lifetime for p in settings.policies or ()] == [Chunk(tokens=64)] * 3 + [Full()]


def test_vanilla_ignores_the_file_with_a_warning(tmp_path: Path) -> None:
    assert resolve(tmp_path, MISSION, mode=False).policies is None


def test_a_saved_config_is_read_back(tmp_path: Path) -> None:
    made = HybridConfig(block_size_map={"full": 16}, kv_cache_ratio={"full": 0.5})
    made.save(tmp_path / "h.json")
    assert load_hybrid_file(tmp_path / "h.json") == {
        "block_size_map": {"full": 16},
        "kv_cache_ratio": {"full": 0.5},
    }


def test_trace_level() -> None:
    with pytest.raises(ConfigError, match="--trace-level is 'all'; allowed: off, info, debug"):
        resolve_hybrid(QWEN2, 100, trace_level="all")
