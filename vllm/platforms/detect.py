"""Which device there is, found out without importing torch.

Called by config/resolve.py in the process of the caller, which may never need torch. Asks the
driver how many GPUs it shows and torch's version file whether it was built for them; creates no
context on any.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from functools import cache
from pathlib import Path

_CUDA_BUILD = re.compile(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", re.MULTILINE)


@cache
def find_device() -> str:
    """Return "cuda" where this process can compute on a GPU, else "cpu"."""
    return "cpu" if find_cuda_fault() else "cuda"


@cache
def find_cuda_fault() -> str:
    """Return why this process cannot compute on a GPU; empty if it can."""
    if not _is_torch_built_for_cuda():
        return "the installed torch was built without CUDA"
    try:
        driver = _load_driver()
    except OSError:
        return "there is no NVIDIA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0:
        return f"the NVIDIA driver answers with error {status}"
    return "" if count.value else "no GPU is visible (CUDA_VISIBLE_DEVICES?)"


@cache
def find_gpu_bytes() -> int:
    """Return the memory of the first visible GPU; 0 where this process cannot compute on one."""
    if find_cuda_fault():
        return 0
    num_bytes = ctypes.c_size_t(0)
    status = _load_driver().cuDeviceTotalMem_v2(ctypes.byref(num_bytes), 0)
    return num_bytes.value if status == 0 else 0


def _load_driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _is_torch_built_for_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).parent / "version.py"
    return version_file.is_file() and _CUDA_BUILD.search(version_file.read_text()) is not None
