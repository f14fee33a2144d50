"""Tensors of a GGUF file under their Hugging Face names, dequantised one by one.

Called by `weights.py`. Maps names, undoes what converters do to values (rotary row order of the
llama family, Gemma's 1 + w norms, stacked experts) and dequantises in slices, on all processors,
straight to the model's element type. Block formats are the gguf package's business; headers are
read by `transformers_utils/gguf_file.py`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import gguf
import numpy as np
import torch
from torch import Tensor

from vllm.model_executor.model_loader.mapped_file import MappedFiles, as_tensor
from vllm.model_executor.model_loader.stored_tensor import StoredTensor
from vllm.transformers_utils.gguf_config import ROPE_FACTORS
from vllm.transformers_utils.gguf_file import GGUFFile
from vllm.transformers_utils.gguf_tensor import GGUFTensor

# Elements that one thread dequantises at a time: float32 values and temporaries stay in its cache.
_SLICE_ELEMENTS = 1 << 17
# torch copies fewer elements than this on the calling thread; more would wake its own threads too.
_COPY_ELEMENTS = (1 << 15) - 1
_MAX_THREADS = 8
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Bytes: TypeAlias = np.ndarray[Any, Any]
RowOrder: TypeAlias = Callable[[Bytes], Bytes]

_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN_MOE_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FAMILY_NAMES: dict[str, Mapping[str, str]] = {
    "llama": _LAYER_NAMES | _MIXTRAL_NAMES,
    "qwen2": _LAYER_NAMES,
    "qwen3": _LAYER_NAMES,
    "qwen2moe": _LAYER_NAMES | _QWEN_MOE_NAMES,
    "gemma": _LAYER_NAMES,
    "gemma2": _LAYER_NAMES | _GEMMA_NAMES,
    "gemma3": _LAYER_NAMES | _GEMMA_NAMES,
}
_ROTARY_ROWS = ("llama",)
_OFFSET_NORMS = ("gemma", "gemma2", "gemma3")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OLD_EXPERT = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_up|ffn_down)\.(\d+)\.weight")
_OUTER = re.compile(r"(\w+)\.(weight|bias)")


class GGUFWeights:
    """The tensors of a model, in file order.

    Args:
        file: its header; for a split model, that of all parts.
        dtype: element type of dequantised tensors. F32, F16 and BF16 tensors keep their own.

    Attributes:
        num_tensors: how many the file holds; stacked experts are yielded one by one.
        total_bytes: bytes of all of them in the file.
    """

    def __init__(self, file: GGUFFile, dtype: torch.dtype) -> None:
        self._file = file
        self._dtype = dtype
        # The rotary factors are part of the config, see gguf_config.py.
        self._tensors = [t for t in file.tensors.values() if t.name != ROPE_FACTORS]
        self.num_tensors = len(self._tensors)
        self.total_bytes = sum(tensor.num_bytes for tensor in self._tensors)

    def __iter__(self) -> Iterator[StoredTensor]:
        """Yield tensors under their Hugging Face names, or the file's where the family has none.

        Raises:
            WeightError: an element type that cannot be read, or a file that ends too early.
        """
        with _Reader(self._dtype) as reader:
            for tensor in self._tensors:
                name = translate_name(self._file.architecture, tensor.name)
                yield from _read_tensor(tensor, name, self._file, reader)
                reader.release(tensor)


def translate_name(architecture: str, name: str) -> str:
    """Return the Hugging Face name of a tensor, with {e} where the file stacks experts.

    A name that the architecture does not have is returned as it is.
    """
    names = _FAMILY_NAMES.get(architecture, _LAYER_NAMES)
    if layer := _LAYER.fullmatch(name):
        index, key, field = layer.groups()
        return f"model.layers.{index}.{names[key]}.{field}" if key in names else name
    if expert := _OLD_EXPERT.fullmatch(name):
        index, key, number = expert.groups()
        stacked = names.get(f"{key}_exps")
        if stacked is not None:
            return f"model.layers.{index}.{stacked.replace('{e}', number)}.weight"
        return name
    outer = _OUTER.fullmatch(name)
    if outer and outer[1] in _OUTER_NAMES:
        return f"{_OUTER_NAMES[outer[1]]}.{outer[2]}"
    return name


def _read_tensor(
    tensor: GGUFTensor, name: str, file: GGUFFile, reader: _Reader
) -> Iterator[StoredTensor]:
    if "{e}" in name:
        for expert in range(tensor.shape[0]):
            yield StoredTensor(
                name=name.replace("{e}", str(expert)),
                tensor=reader.read(tensor, part=expert),
                stored_bytes=tensor.num_bytes // tensor.shape[0],
            )
        return
    values = reader.read(tensor, reorder=_row_order(file, name))
    if file.architecture in _OFFSET_NORMS and name.endswith("norm.weight"):
        values = values.float() - 1.0
    if name.endswith("shared_expert_gate.weight") and values.dim() == 1:
        values = values.unsqueeze(0)
    yield StoredTensor(name=name, tensor=values, stored_bytes=tensor.num_bytes)


def _row_order(file: GGUFFile, name: str) -> RowOrder | None:
    """Return what brings the rows of a q or k projection back to the checkpoint's order.

    llama-family files hold each head's rows as pairs (0, D/2), (1, D/2 + 1), ... of the
    checkpoint's rows, so that the pairs that are rotated together lie side by side.
    """
    if file.architecture not in _ROTARY_ROWS:
        return None
    if ".self_attn.q_proj." in name:
        num_heads = int(file.get("attention.head_count"))
    elif ".self_attn.k_proj." in name:
        num_heads = int(file.get("attention.head_count_kv") or file.get("attention.head_count"))
    else:
        return None

    def reorder(rows: Bytes) -> Bytes:
        paired = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)

    return reorder


class _Reader:
    """Reads and dequantises tensors; a context manager that holds the maps and the threads."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._maps = MappedFiles()
        threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dequantize")

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def release(self, tensor: GGUFTensor) -> None:
        """Give the memory of a tensor's bytes back to the system."""
        self._maps.release(tensor.path, tensor.offset_bytes, tensor.num_bytes)

    def read(
        self, tensor: GGUFTensor, *, part: int | None = None, reorder: RowOrder | None = None
    ) -> Tensor:
        """Return a tensor, or one index of its outermost dimension.

        Args:
            tensor: what to read.
            part: index along dimension 0, None for all of it.
            reorder: applied to the rows as stored, before dequantising.
        """
        shape = tensor.shape if part is None else tensor.shape[1:]
        raw = self._maps.view(tensor.path, tensor.offset_bytes, tensor.num_bytes)
        if part is not None:
            raw = raw.reshape(tensor.shape[0], -1)[part]
        if reorder is not None:
            raw = reorder(raw.reshape(shape[0], -1))
        plain = _PLAIN.get(tensor.type_name)
        if plain is not None:
            return as_tensor(raw, plain, shape)
        columns = shape[-1]
        rows = raw.reshape(math.prod(shape) // columns, -1)
        return self._dequantize(rows, columns, tensor.type_id).reshape(shape)

    def _dequantize(self, rows: Bytes, columns: int, type_id: int) -> Tensor:
        """Dequantise rows of blocks, uint8 [rows, bytes], slice by slice on all threads."""
        out = torch.empty(rows.shape[0], columns, dtype=self._dtype)
        step = max(1, _SLICE_ELEMENTS // columns)
        kind = gguf.GGMLQuantizationType(type_id)

        def work(start: int) -> None:
            _store(gguf.dequantize(rows[start : start + step], kind), out[start : start + step])

        starts = range(0, rows.shape[0], step)
        if len(starts) == 1:
            work(0)
        else:
            list(self._pool.map(work, starts))  # raises what a slice raised
        return out


def _store(values: np.ndarray[Any, Any], out: Tensor) -> None:
    """Copy float32 values into a contiguous tensor of the model's type, on this thread alone."""
    source, target = torch.from_numpy(values).view(-1), out.view(-1)
    for start in range(0, target.numel(), _COPY_ELEMENTS):
        target[start : start + _COPY_ELEMENTS].copy_(source[start : start + _COPY_ELEMENTS])
