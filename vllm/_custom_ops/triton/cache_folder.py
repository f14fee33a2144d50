"""Where Triton keeps what it has compiled.

Called by the worker of a GPU before anything is compiled, and before it by the process of a rank,
where there are several.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from pathlib import Path

from triton import knobs

from vllm.errors import KernelError
from vllm.logger import init_logger

logger = init_logger(__name__)

_TRIAL_BYTES = 1 << 20
"""More than most compiled kernels have."""


def provide_cache_folder(shared: Path | None = None) -> None:
    """Give this process and those that it starts another folder where Triton's cannot be written.

    What lies in Triton's own is found there too, and nothing that is compiled outlives the process,
    or whoever removes what is shared.

    Args:
        shared: the folder that all ranks of an engine then have, made where it is missing; None
            makes one that goes with this process.

    Raises:
        KernelError: no other folder can be written either.
    """
    folder = Path(knobs.cache.dir)
    try:
        _try_folder(folder)
        return
    except OSError as error:
        why = error
    try:
        own = shared or _make_folder()
        _try_folder(own)
    except OSError as error:
        raise KernelError(
            f"Triton has nowhere to compile kernels to: its cache cannot be written ({why}), and a "
            f"temporary folder neither ({error}). Let TRITON_CACHE_DIR name a folder that can be "
            "written, and TMPDIR, or free some space"
        ) from error
    logger.warning(
        "Triton's cache cannot be written (%s); kernels that are missing there are compiled at "
        "every start. Let TRITON_CACHE_DIR name a folder that can be written",
        why,
    )
    with contextlib.suppress(OSError):  # it need not be there, or be readable
        for entry in folder.iterdir():
            _link_files(entry, own / entry.name)
    knobs.cache.dir = str(own)


def _try_folder(folder: Path) -> None:
    """Make a folder if it is missing and write into it.

    Raises:
        OSError: one of the two fails; a full disk would still take an empty file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_TRIAL_BYTES))


def _make_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="vllm-triton-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _link_files(entry: Path, own: Path) -> None:
    """Link the files of one kernel, in a folder that takes those that are missing there."""
    own.mkdir(exist_ok=True)
    with contextlib.suppress(OSError):  # it may be no folder, or not be ours to read
        for file in entry.iterdir():
            with contextlib.suppress(FileExistsError):  # another rank has
                (own / file.name).symlink_to(file)
