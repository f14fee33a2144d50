"""Headers of GGUF files: what they hold, parts, and files that are broken anywhere."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.utils.fixtures_gguf import write_fx_gguf
from vllm.errors import WeightError
from vllm.transformers_utils.gguf_file import is_gguf_file, read_gguf
from vllm.transformers_utils.gguf_tensor import GGUF_TYPES


def test_block_sizes_are_those_of_the_format() -> None:
    for ident, kind in GGUF_TYPES.items():
        known = gguf.GGMLQuantizationType(ident)
        assert known.name == kind.name
        assert gguf.GGML_QUANT_SIZES[known] == (kind.block_len, kind.block_bytes)


def test_header_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    metadata = {
        "a.flag": True,
        "a.number": 7,
        "a.ratio": 0.25,
        "a.text": "wörter",
        "a.floats": [0.5, 1.5],
        "a.names": ["x", "", "ü"],
        "a.long": list(range(3000)),
        "a.long_names": [f"name {i}" for i in range(2000)],
    }
    path = write_fx_gguf(tmp_path / "fx.gguf", metadata=metadata)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        value = field.contents()
        if isinstance(value, list):
            assert ours.array(key) == value
            assert ours.array_len(key) == len(value)
        else:
            assert ours.metadata[key] == value
    assert "a.long_names" not in ours.metadata  # read when asked for
    assert ours.array("no.such") == [] and ours.array_len("no.such") == 0
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert entry.offset_bytes == tensor.data_offset and entry.num_bytes == tensor.n_bytes
    assert ours.architecture == "llama" and ours.get("block_count") == 2


def test_alignment_of_the_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", np.arange(3, dtype=np.float32))
    writer.add_tensor("b", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf(path).tensors["b"]
    data = path.read_bytes()[tensor.offset_bytes :][: tensor.num_bytes]
    assert np.array_equal(np.frombuffer(data, np.float32), np.arange(5))


def test_what_counts_as_a_gguf_file(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GG")
    assert not is_gguf_file(other) and not is_gguf_file(tmp_path)
    assert not is_gguf_file(tmp_path / "absent")
    assert is_gguf_file(write_fx_gguf(tmp_path / "fx"))
    with pytest.raises(WeightError, match="not a GGUF file"):
        read_gguf(other)
    other.write_bytes(b"")
    with pytest.raises(WeightError, match="empty"):
        read_gguf(other)


def test_truncated_data_names_tensor_and_bytes(tmp_path: Path) -> None:
    path = write_fx_gguf(tmp_path / "fx.gguf")
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size - 1000)
    with pytest.raises(WeightError, match=rf"truncated: tensor 'blk\.1\..*ends at {size - 1000}"):
        read_gguf(path)


def test_a_header_cut_anywhere_is_a_weight_error(tmp_path: Path) -> None:
    whole = write_fx_gguf(tmp_path / "fx.gguf").read_bytes()
    end = min(t.offset_bytes for t in read_gguf(tmp_path / "fx.gguf").tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in [*range(4, 64), *range(64, end, 97)]:
        cut.write_bytes(whole[:length])
        with pytest.raises(WeightError, match="truncated"):
            read_gguf(cut)


def test_a_header_damaged_anywhere_is_read_or_refused(tmp_path: Path) -> None:
    """Whatever the bytes say, reading ends, and with nothing but a WeightError."""
    whole = write_fx_gguf(tmp_path / "fx.gguf").read_bytes()
    end = min(t.offset_bytes for t in read_gguf(tmp_path / "fx.gguf").tensors.values())
    rng = random.Random(0)
    damaged = tmp_path / "damaged.gguf"
    num_refused = 0
    for _ in range(300):
        data = bytearray(whole[: end + 4096])
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(4, end)] = rng.randrange(256)
        damaged.write_bytes(data)
        try:
            read_gguf(damaged)
        except WeightError:
            num_refused += 1
    assert num_refused > 100


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_versions_that_cannot_be_read(version: int, tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + bytes(16))
    with pytest.raises(WeightError, match=f"version {version}"):
        read_gguf(path)


def test_an_element_type_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "iq.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType.IQ4_NL
    writer.add_tensor("strange.weight", np.zeros((2, 18), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightError, match=r"'strange\.weight' has element type 20.*Q4_K"):
        _ = read_gguf(path).tensors["strange.weight"].num_bytes


class TestParts:
    """Case C35."""

    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        write_fx_gguf(tmp_path / "fx.gguf", split_max_tensors=9)
        return sorted(tmp_path.glob("fx-*-of-00003.gguf"))

    def test_first_part_stands_for_all(self, parts: list[Path], tmp_path: Path) -> None:
        whole = read_gguf(write_fx_gguf(tmp_path / "whole.gguf"))
        file = read_gguf(parts[0])
        assert len(parts) == 3 and list(file.tensors) == list(whole.tensors)
        assert {t.path for t in file.tensors.values()} == set(parts)
        assert file.get("block_count") == 2

    @pytest.mark.parametrize("part", [1, 2])
    def test_another_part_names_the_first(self, part: int, parts: list[Path]) -> None:
        with pytest.raises(WeightError, match=rf"part {part + 1} .*{parts[0].name}"):
            read_gguf(parts[part])

    def test_a_missing_part_is_named(self, parts: list[Path]) -> None:
        parts[2].unlink()
        with pytest.raises(WeightError, match=f"missing.*{parts[2].name}"):
            read_gguf(parts[0])

    def test_a_truncated_part_is_named(self, parts: list[Path]) -> None:
        with open(parts[1], "r+b") as file:
            file.truncate(parts[1].stat().st_size - 10)
        with pytest.raises(WeightError, match=f"{parts[1].name} is truncated"):
            read_gguf(parts[0])

    def test_a_part_of_another_model_is_noticed(self, parts: list[Path], tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.mkdir()
        write_fx_gguf(other / "fx.gguf", split_max_tensors=8)
        parts[2].write_bytes((other / parts[2].name).read_bytes())
        with pytest.raises(WeightError, match=rf"'blk.*{parts[1].name}.*{parts[2].name}"):
            read_gguf(parts[0])

    def test_parts_that_lack_tensors_are_noticed(self, parts: list[Path]) -> None:
        data = bytearray(parts[0].read_bytes())
        key = b"split.tensors.count"
        value = data.index(key) + len(key) + 4  # behind the value's type
        assert data[value] == 20
        data[value] = 21
        parts[0].write_bytes(data)
        with pytest.raises(WeightError, match=r"hold 20 tensors .* promises 21"):
            read_gguf(parts[0])

    def test_a_renamed_part_says_what_is_expected(self, parts: list[Path]) -> None:
        renamed = parts[0].rename(parts[0].with_name("model.gguf"))
        with pytest.raises(WeightError, match=r"-00001-of-00003\.gguf"):
            read_gguf(renamed)

    def test_a_single_part_loads(self, tmp_path: Path) -> None:
        path = write_fx_gguf(
            tmp_path / "fx-00001-of-00001.gguf", metadata={"split.count": 1, "split.no": 0}
        )
        assert len(read_gguf(path).tensors) == 20
