"""Runs kernels written in Gluon on a CPU as the Python that they are: warps are threads.

What a kernel calls is stood in for: tiles in shared memory and in registers are torch's tensors,
barriers count as the device's do, copies and products are done at once. Layouts mean nothing here.
Finds wrong places, masks and phases, and partitions that wait for each other for ever; does not
find what is read before it is there.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction

from vllm._custom_ops.triton import copy_engine
from vllm._custom_ops.triton.device import has_warp_group_products
from vllm._custom_ops.triton.launch import FastKernel
from vllm.utils.math import cdiv

MAX_WAIT_S = 30.0
_program = threading.local()  # of a thread: its indices and how many there are, by axis


@dataclass(frozen=True, slots=True)
class Pointer:
    """Elements of a flat tensor."""

    memory: Tensor
    offset: Any

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + other)

    def __getitem__(self, axes: Any) -> Pointer:
        return Pointer(self.memory, self.offset[axes])

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)

    @classmethod
    def to(cls, tensor: Tensor) -> Pointer:
        """Return a pointer to the first element."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(tensor.as_strided((size,), (1,), 0), tensor.storage_offset())


class Number(int):
    """An integer that was loaded."""

    def to(self, dtype: torch.dtype) -> Number:
        return self


@dataclass(frozen=True, slots=True)
class Memory:
    """Shared memory; nothing is in it at first."""

    rows: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def index(self, i: int) -> Memory:
        return Memory(self.rows[i])

    def permute(self, axes: tuple[int, ...]) -> Memory:
        return Memory(self.rows.permute(axes))

    def slice(self, start: int, length: int, dim: int) -> Memory:
        return Memory(self.rows.narrow(dim, start, length))

    def load(self, layout: Any) -> Tensor:
        return self.rows.clone()

    def store(self, values: Tensor) -> None:
        self.rows.copy_(values)


@dataclass(slots=True)
class Barrier:
    """Ends a phase when all have arrived and all bytes that are expected are there."""

    count: int = 0
    pending: int = 0
    missing_bytes: int = 0
    phase: int = 0
    changes: threading.Condition = field(default_factory=threading.Condition)

    def change(self, arrivals: int, num_bytes: int) -> None:
        with self.changes:
            self.pending -= arrivals
            self.missing_bytes += num_bytes
            assert self.pending >= 0, "more arrivals than a phase has"
            if self.pending == self.missing_bytes == 0:
                self.phase ^= 1
                self.pending = self.count
                self.changes.notify_all()

    def wait(self, phase: int) -> None:
        with self.changes:
            ended = self.changes.wait_for(lambda: self.phase != phase, MAX_WAIT_S)
        assert ended, "nobody ends this phase"


class Barriers(list[Barrier]):
    """An allocation of barriers."""

    def index(self, i: int) -> Barrier:  # type: ignore[override]
        return self[i]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A matrix whose tiles the copy engine brings; rows outside of it are zeros."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    block: list[int]
    layout: Any

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype


def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Memory | Barriers:
    """Stand in for `allocate_shared_memory`."""
    if dtype == torch.int64:
        return Barriers(Barrier() for _ in range(shape[0]))
    return Memory(torch.full(tuple(shape), float("nan"), dtype=dtype))


def start_barrier(barrier: Barrier, count: int) -> None:
    """Stand in for `mbarrier.init`."""
    barrier.count = barrier.pending = count


def copy_tile(
    tiles: Descriptor, place: Sequence[int], barrier: Barrier, target: Memory, pred: bool = True
) -> None:
    """Stand in for `tma.async_copy_global_to_shared`."""
    if not pred:
        return
    (row, column), (num_rows, width) = place, tiles.block
    assert 0 <= column < tiles.shape[1]
    first, end = max(row, 0), min(row + num_rows, tiles.shape[0])
    target.rows.zero_()
    if first < end:
        matrix = tiles.base.as_strided(tiles.shape, tiles.strides)
        part = matrix[first:end, column : column + width]
        target.rows[first - row : end - row, : part.shape[1]] = part
    barrier.change(0, -num_rows * width * tiles.base.element_size())


def write_tile(tiles: Descriptor, place: Sequence[int], source: Memory) -> None:
    """Stand in for `tma.async_copy_shared_to_global`."""
    (row, column), (num_rows, width) = place, tiles.block
    assert row >= 0 and 0 <= column <= tiles.shape[1] - width
    matrix = tiles.base.as_strided(tiles.shape, tiles.strides)
    part = matrix[row : row + num_rows, column : column + width]
    part.copy_(source.rows[: len(part)])


def multiply(a: Any, b: Memory, sums: Tensor, *, use_acc: bool = True, is_async: bool) -> Tensor:
    """Stand in for `warpgroup_mma`."""
    product = (a.rows if isinstance(a, Memory) else a).float() @ b.rows.float()
    return sums + product if use_acc else product


def await_products(num_outstanding: int, deps: Sequence[Any]) -> Any:
    """Stand in for `warpgroup_mma_wait`."""
    return deps[0] if len(deps) == 1 else tuple(deps)


def load(pointer: Pointer, mask: Any = True, other: float = 0.0) -> Any:
    """Load one number, or a tile of them."""
    if not isinstance(pointer.offset, Tensor):
        number = pointer.memory[pointer.offset]
        return number if number.is_floating_point() else Number(number)
    offset, mask = torch.broadcast_tensors(pointer.offset, torch.as_tensor(mask))
    values = torch.full(offset.shape, other, dtype=pointer.memory.dtype)
    values[mask] = pointer.memory[offset[mask]]
    return values


def store(pointer: Pointer, values: Tensor, mask: Any = True) -> None:
    """Store elements."""
    offset, mask = torch.broadcast_tensors(pointer.offset, torch.as_tensor(mask))
    pointer.memory[offset[mask]] = values[mask].to(pointer.memory.dtype)


def where(condition: Any, first: Any, second: Any) -> Any:
    """Select, integers or elements of tensors."""
    if isinstance(condition, Tensor):
        return torch.where(condition, first, second)
    return first if condition else second


def run_side_by_side(parts: Sequence[Any], num_warps: Any, num_registers: Any) -> None:
    """Stand in for `warp_specialize`."""
    place, errors = vars(_program), []

    def run(function: Callable[..., None], args: tuple[Any, ...]) -> None:
        vars(_program).update(place)
        try:
            function(*args)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def either(of_tensors: Callable[[Tensor, Tensor], Tensor], of_numbers: Callable[..., Any]) -> Any:
    """Return a function of two numbers, or of a tensor and what it is compared with."""

    def apply(a: Any, b: Any) -> Any:
        b = getattr(b, "value", b)  # a constant of the module
        if not isinstance(a, Tensor):
            return of_numbers(a, b)
        return of_tensors(a, torch.as_tensor(b, dtype=a.dtype))

    return apply


def no_layout(*args: Any) -> None:
    """Stand in for a layout."""


LANGUAGE = SimpleNamespace(
    **{name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int64", "exp2")},
    **dict.fromkeys(
        ("SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout"), no_layout
    ),
    NVMMASharedLayout=SimpleNamespace(get_default_for=no_layout),
    allocate_shared_memory=allocate,
    arange=lambda start, end, layout: torch.arange(start, end),
    cdiv=cdiv,
    constexpr=lambda value: value,
    convert_layout=lambda values, layout: values,
    fma=lambda a, b, c: a * b + c,
    inline_asm_elementwise=lambda text, constraints, args, **options: args[0] if args else None,
    load=load,
    max=lambda values, axis: values.amax(axis),
    maximum=either(torch.maximum, max),
    minimum=either(torch.minimum, min),
    num_programs=lambda axis: _program.counts[axis],
    program_id=lambda axis: _program.indices[axis],
    static_range=range,
    store=store,
    sum=lambda values, axis: values.sum(axis),
    thread_barrier=lambda: None,
    warp_specialize=run_side_by_side,
    where=where,
    zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    zeros_like=torch.zeros_like,
)
STAND_INS = {
    "TensorDescriptor": Descriptor,
    "fence_async_shared": lambda: None,
    "gl": LANGUAGE,
    "mbarrier": SimpleNamespace(
        MBarrierLayout=no_layout,
        arrive=lambda barrier, count: barrier.change(count, 0),
        expect=lambda barrier, num_bytes, pred=True: barrier.change(pred, num_bytes * pred),
        init=start_barrier,
        wait=Barrier.wait,
    ),
    "tma": SimpleNamespace(
        async_copy_global_to_shared=copy_tile,
        async_copy_shared_to_global=write_tile,
        store_wait=lambda pendings: None,
    ),
    "warpgroup_mma": multiply,
    "warpgroup_mma_wait": await_products,
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel whose programs run one after the other."""

    function: Callable[..., None]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, launch_pdl: bool = False, **constants: Any) -> None:
            given = [Pointer.to(arg) if isinstance(arg, Tensor) else arg for arg in args]
            for indices in itertools.product(*map(range, grid)):
                _program.indices, _program.counts = indices, grid
                self.function(*given, **constants)

        return launch


def interpret(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let the kernels of modules run here."""
    for module in modules:
        for name, value in list(vars(module).items()):
            if name in STAND_INS:
                monkeypatch.setattr(module, name, STAND_INS[name])
            elif isinstance(value, FastKernel):
                monkeypatch.setattr(module, name, Kernel(value.jit.fn))
            elif isinstance(value, GluonJITFunction):
                monkeypatch.setattr(module, name, value.fn)


def play_hopper(
    monkeypatch: pytest.MonkeyPatch,
    interpreted: Sequence[ModuleType],
    *,
    hosts: Sequence[ModuleType] = (),
    num_processors: int = 3,
) -> bool:
    """Let a CPU be a Hopper of few processors for one test; on another GPU the test is left out.

    Args:
        interpreted: modules whose kernels it is for; their tiles are described here, too.
        hosts: others that ask what device there is.

    Returns:
        Whether a CPU plays it; else there is a Hopper.
    """
    if torch.cuda.is_available():
        if not has_warp_group_products(torch.device("cuda", 0)):
            pytest.skip("no sm_90")
        return False
    interpret(monkeypatch, copy_engine, *interpreted)
    answers = {"has_warp_group_products": True, "count_processors": num_processors}
    for module in (copy_engine, *interpreted, *hosts):
        for name in answers.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, lambda device, answer=answers[name]: answer)
    return True
