"""Launches of Triton kernels that take little host time.

Kernel modules mark what they launch with `@fast_launch`, above `@triton.jit`, and launch as ever:
`_kernel[grid](...)`. Triton works out at each launch which of its compiled kernels the arguments
want, which for thirty of them takes longer than a small kernel runs. Here the same is looked up by
what tells launches apart: types, element types, alignments, and the values of integers. The first
launch of a kind is Triton's own, and so is every launch that is out of the ordinary.

Constants and options (`num_warps`, `launch_pdl` …) are given by name, all other arguments by
place. Interpreted kernels are launched by the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, Protocol

import triton
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm.errors import KernelError

_ALIGNMENT_BITS = 15  # Triton tells addresses and integers apart by whether 16 divides them
_INT32_MIN, _INT32_MAX = -(1 << 31), (1 << 31) - 1
_TRITON = "3.6."
"""Whose launchers these are; kernels of other versions are launched as Triton does."""

_MAX_READY = 4096
"""Launches that a kernel remembers; far more than there are, but nothing relies on it."""

_find_dtype = attrgetter("dtype")


def _describe(descriptor: TensorDescriptor | GluonDescriptor) -> tuple[Any, ...]:
    """Return on what of a descriptor a compiled kernel depends; the launcher takes the rest.

    The layout of one of Gluon's is here always that of its block and element type.
    """
    return descriptor.base.dtype, tuple(descriptor.block_shape), descriptor.padding


class LaunchNotes(Protocol):
    """What takes launches in the place of the device, see `divert_launches`."""

    def take(
        self, kernel: FastKernel, key: Any, args: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """Take one launch; those of a kernel that are alike have one key."""
        ...


_notes: list[LaunchNotes] = []  # the innermost last


@contextmanager
def divert_launches(notes: LaunchNotes) -> Iterator[None]:
    """Launch nothing inside; `notes` is told instead. For one thread at a time."""
    _notes.append(notes)
    try:
        yield
    finally:
        _notes.pop()


_kernels: list[FastKernel] = []


def fix_cache_keys() -> None:
    """Let Triton hash all kernels that there are in one order, before any is compiled.

    Its hash of a function, and so the key of a kernel in the cache on disk, depends on what was
    hashed before where functions call each other in circles, as some of its own do. Processes that
    launch in another order would not find each other's kernels.
    """
    for kernel in sorted(_kernels, key=lambda kernel: (kernel.jit.module, kernel.jit.__name__)):
        _ = kernel.jit.cache_key  # hashes when it is asked for


class FastKernel:
    """A kernel that is launched as `kernel[grid](...)`.

    Args:
        jit: what `triton.jit` returned.
        compiled_in: entered around a launch that may compile.
    """

    def __init__(
        self, jit: JITFunction[Any], compiled_in: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.jit = jit
        self.compiled_in = compiled_in
        self._layouts: dict[tuple[type, ...], _Layout] = {}
        self._ready: dict[Any, _Ready] = {}
        _kernels.append(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        types = tuple(map(type, args))
        layout = self._layouts.get(types) or self._lay_out(types)
        tensors = layout.pick_tensors(args)
        addresses = tuple(map(Tensor.data_ptr, tensors))
        is_aligned = not reduce(or_, addresses, 0) & _ALIGNMENT_BITS
        active = driver.active
        device = active.get_current_device()
        key = (
            device,
            types,
            tuple(map(_find_dtype, tensors)),
            is_aligned or tuple(address & _ALIGNMENT_BITS for address in addresses),
            layout.pick_exact(args),
            tuple(map(_describe, layout.pick_descriptors(args))),
            tuple(constants),
            tuple(constants.values()),
        )
        if _notes:
            _notes[-1].take(self, key, args, constants)
            return
        loose = layout.pick_loose(args)
        if (loose and not _INT32_MIN <= min(loose) <= max(loose) <= _INT32_MAX) or (
            knobs.runtime.launch_enter_hook.calls  # a profiler's
        ):
            self._launch_slowly(grid, args, constants)
            return
        ready = self._ready.get(key)
        if ready is None:
            self._remember(key, self._launch_slowly(grid, args, constants), len(args), constants)
            return
        values = list(args)
        for place, address in zip(layout.tensors, addresses, strict=True):
            values[place] = address
        width, height, depth = (*grid, 1, 1)[:3]
        ready.run(
            width,
            height,
            depth,
            active.get_current_stream(device),
            ready.function,
            ready.metadata,
            None,  # what hooks would be told, and the hooks
            None,
            None,
            *values,
            *ready.constants,
        )

    def _launch_slowly(
        self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
    ) -> Any:
        """Let Triton launch, and return the kernel that it took.

        Raises:
            KernelError: the GPU has not what the kernel takes.
        """
        try:
            with self.compiled_in():
                return self.jit[grid](*args, **constants)
        except OutOfResources as error:
            raise KernelError(
                f"{self.jit.__name__} of {self.jit.module} wants {error.required} ({error.name}) "
                f"for sizes of this model, sm_{driver.active.get_current_target().arch} has "
                f"{error.limit}: take a GPU with more, or report this with the model's config.json"
            ) from error

    def _remember(self, key: Any, kernel: Any, num_given: int, constants: dict[str, Any]) -> None:
        parameters = self.jit.params[num_given:]
        if not (
            hasattr(kernel, "packed_metadata")  # else it is still being compiled
            and all(parameter.is_constexpr for parameter in parameters)
        ):
            return
        if len(self._ready) >= _MAX_READY:
            self._ready.clear()
        values = {p.name: p.default for p in parameters if p.has_default} | constants
        self._ready[key] = _Ready(
            run=kernel.run,
            function=kernel.function,
            metadata=kernel.packed_metadata,
            constants=tuple(values[parameter.name] for parameter in parameters),
        )

    def _lay_out(self, types: tuple[type, ...]) -> _Layout:
        tensors, descriptors, exact, loose = [], [], [], []
        for place, (kind, parameter) in enumerate(zip(types, self.jit.params, strict=False)):
            if issubclass(kind, Tensor):
                tensors.append(place)
            elif issubclass(kind, (TensorDescriptor, GluonDescriptor)):
                descriptors.append(place)
            elif kind is int and parameter.do_not_specialize and not parameter.is_constexpr:
                loose.append(place)
            elif parameter.is_constexpr or kind not in (float, type(None)):
                exact.append(place)
        layout = _Layout(
            tensors=tuple(tensors),
            pick_tensors=_make_picker(tensors),
            pick_descriptors=_make_picker(descriptors),
            pick_exact=_make_picker(exact),
            pick_loose=_make_picker(loose),
        )
        self._layouts[types] = layout
        return layout


_Picker = Callable[[Sequence[Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layout:
    """Which arguments are what, for one sequence of argument types.

    Attributes:
        tensors: their places.
        pick_exact: picks arguments on whose values a compiled kernel may depend.
        pick_loose: picks integers on whose values it does not depend if they have 32 bits.
    """

    tensors: tuple[int, ...]
    pick_tensors: _Picker
    pick_descriptors: _Picker
    pick_exact: _Picker
    pick_loose: _Picker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ready:
    """A compiled kernel.

    Attributes:
        run: Triton's launcher.
        constants: values of the parameters that are given by name, in their order.
    """

    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


def _make_picker(places: Sequence[int]) -> _Picker:
    if not places:
        return lambda args: ()
    if len(places) == 1:
        return lambda args: (args[places[0]],)
    return itemgetter(*places)


def knows_triton() -> bool:
    """Return whether launches are ours, and so can be diverted."""
    return triton.__version__.startswith(_TRITON)


def fast_launch(
    kernel: Any, *, compiled_in: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Any:
    """Return a kernel whose launches take little host time; the given one where that is not known.

    Args:
        kernel: what `triton.jit` returned.
        compiled_in: entered around a launch that may compile.
    """
    if not isinstance(kernel, JITFunction) or not knows_triton():
        return kernel
    return FastKernel(kernel, compiled_in)
