"""State ops against their naive twins, under the bit rule, over poisoned caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.utils.ops import FLOAT_DTYPES, poisoned, random_rows
from tests.utils.paged import cumulative
from vllm._custom_ops import state_space as ops
from vllm._custom_ops.library import available_cpu_isas, cpu_isa, set_cpu_isa
from vllm._custom_ops.naive import state_space as naive
from vllm.errors import ShapeError

UNIT_BYTES = 256
LENGTHS = [1, 3, 64, 65, 0, 130, 2]
NUM_COMPUTED = [0, 7, 0, 1, 5, 0, 64]
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1.6e-2, 4e-3)}


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    threads, isa = torch.get_num_threads(), cpu_isa()
    yield
    torch.set_num_threads(threads)
    set_cpu_isa(isa)


@dataclass(frozen=True, kw_only=True)
class States:
    """A strided view of states, NaN where a new row will write, and where each row's lies."""

    view: Tensor
    offsets: Tensor

    def copy(self) -> States:
        """Return the same states in memory of their own."""
        flat = self.view.untyped_storage().clone()
        view = torch.empty(0, dtype=self.view.dtype).set_(
            flat, self.view.storage_offset(), self.view.shape, self.view.stride()
        )
        return States(view=view, offsets=self.offsets)


def make_states(shape: tuple[int, ...], dtype: torch.dtype, computed: list[int]) -> States:
    """Make one block a row with a gap between blocks; rows that begin hold NaN."""
    num_rows = len(computed)
    size = torch.Size(shape).numel() * dtype.itemsize
    block_units = -(-(size + 64) // UNIT_BYTES)
    arena = torch.full(
        ((num_rows + 1) * block_units * UNIT_BYTES // dtype.itemsize,), float("nan"), dtype=dtype
    )
    strides = [1]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * length)
    num_units = num_rows * block_units
    view = arena.as_strided(
        (num_units, *shape), (UNIT_BYTES // dtype.itemsize, *strides), 64 // dtype.itemsize
    )
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(3))
    offsets = (order * block_units).int()
    for row, done in enumerate(computed):
        if done:
            view[int(offsets[row])] = random_rows(*shape, dtype=dtype, seed=row)
    return States(view=view, offsets=offsets)


Run = Callable[[object, list[int], list[int], States, slice], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An op over fixed inputs of `num_tokens` tokens.

    Attributes:
        state_shape: of one sequence, as the cache holds it.
        run: calls the op of a module for rows of given lengths over a slice of the inputs.
    """

    dtype: torch.dtype
    state_dtype: torch.dtype
    state_shape: tuple[int, ...]
    run: Run


def conv_case(dtype: torch.dtype, channels: int, taps: int, *, bias: bool, silu: bool) -> Case:
    num_tokens = sum(LENGTHS)
    wide = random_rows(num_tokens, channels + 5, dtype=dtype, seed=1)
    weight = random_rows(taps, channels, dtype=dtype, seed=2).T
    shift = random_rows(channels, dtype=dtype, seed=4) if bias else None

    def run(
        module: object, lengths: list[int], computed: list[int], states: States, part: slice
    ) -> Tensor:
        x = wide[part, 2 : 2 + channels]
        out = poisoned(x.shape, dtype)
        module.causal_conv1d(  # type: ignore[attr-defined]
            out, x, weight, shift, states.view.transpose(1, 2), *_rows(states, lengths, computed),
            silu,
        )  # fmt: skip
        return out

    return Case(dtype=dtype, state_dtype=dtype, state_shape=(taps - 1, channels), run=run)


def delta_case(
    dtype: torch.dtype, key_heads: int, heads: int, key_size: int, value_size: int
) -> Case:
    num_tokens = sum(LENGTHS)
    keys = key_heads * key_size
    wide = random_rows(num_tokens, 2 * keys + heads * value_size, dtype=dtype, seed=1)
    g = -random_rows(num_tokens, heads, dtype=torch.float32, seed=2).abs()
    beta = random_rows(num_tokens, heads, dtype=torch.float32, seed=3).sigmoid()

    def run(
        module: object, lengths: list[int], computed: list[int], states: States, part: slice
    ) -> Tensor:
        q, k, v = wide[part].split((keys, keys, heads * value_size), -1)
        q, k = (x.unflatten(-1, (-1, key_size)) for x in (q, k))
        v = v.unflatten(-1, (-1, value_size))
        out = poisoned(v.shape, dtype)
        module.gated_delta_rule(  # type: ignore[attr-defined]
            out, q, k, v, g[part], beta[part], states.view, *_rows(states, lengths, computed),
            key_size**-0.5, True,
        )  # fmt: skip
        return out

    shape = (heads, key_size, value_size)
    return Case(dtype=dtype, state_dtype=torch.float32, state_shape=shape, run=run)


def mamba_case(
    dtype: torch.dtype, heads: int, head_size: int, groups: int, state_size: int, *, plain: bool
) -> Case:
    num_tokens = sum(LENGTHS)
    inner, shared = heads * head_size, groups * state_size
    wide = random_rows(num_tokens, inner + 2 * shared + heads, dtype=dtype, seed=1)
    decay = -random_rows(heads, dtype=torch.float32, seed=2).exp()
    skip, dt_bias = (random_rows(heads, dtype=torch.float32, seed=s) for s in (3, 4))

    def run(
        module: object, lengths: list[int], computed: list[int], states: States, part: slice
    ) -> Tensor:
        x, b, c, dt = wide[part].split((inner, shared, shared, heads), -1)
        x = x.unflatten(-1, (-1, head_size))
        b, c = (t.unflatten(-1, (-1, state_size)) for t in (b, c))
        out = poisoned(x.shape, dtype)
        module.mamba2_scan(  # type: ignore[attr-defined]
            out, x, dt, decay, b, c, None if plain else skip, None if plain else dt_bias,
            states.view, *_rows(states, lengths, computed), 0.01, 1.5 if plain else float("inf"),
        )  # fmt: skip
        return out

    shape = (heads, head_size, state_size)
    return Case(dtype=dtype, state_dtype=torch.float32, state_shape=shape, run=run)


def _rows(states: States, lengths: list[int], computed: list[int]) -> tuple[Tensor, ...]:
    return (
        states.offsets[: len(lengths)],
        cumulative(lengths),
        torch.tensor(computed, dtype=torch.int32),
    )


CASES: dict[str, Callable[[torch.dtype], Case]] = {
    "conv": lambda dtype: conv_case(dtype, 48, 4, bias=True, silu=True),
    "conv_odd": lambda dtype: conv_case(dtype, 37, 3, bias=False, silu=False),
    "conv_short": lambda dtype: conv_case(dtype, 5, 2, bias=True, silu=False),
    "conv_long": lambda dtype: conv_case(dtype, 20, 8, bias=False, silu=True),
    "delta": lambda dtype: delta_case(dtype, 2, 4, 32, 64),
    "delta_odd": lambda dtype: delta_case(dtype, 1, 3, 19, 37),
    "delta_square": lambda dtype: delta_case(dtype, 2, 2, 128, 128),
    "mamba": lambda dtype: mamba_case(dtype, 4, 32, 2, 64, plain=False),
    "mamba_odd": lambda dtype: mamba_case(dtype, 3, 21, 1, 19, plain=True),
    "mamba_deep": lambda dtype: mamba_case(dtype, 2, 16, 2, 128, plain=False),
}


@pytest.mark.parametrize("isa", available_cpu_isas())
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_twin(name: str, dtype: torch.dtype, isa: str) -> None:
    """Rows of all lengths, new and continued; NaN in new rows' states and in outputs."""
    set_cpu_isa(isa)
    case = CASES[name](dtype)
    states = make_states(case.state_shape, case.state_dtype, NUM_COMPUTED)
    expected_states = states.copy()
    whole = slice(0, sum(LENGTHS))
    actual = case.run(ops, LENGTHS, NUM_COMPUTED, states, whole)
    expected = case.run(naive, LENGTHS, NUM_COMPUTED, expected_states, whole)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(
        _flat(states), _flat(expected_states), rtol=1e-5, atol=1e-5, equal_nan=True
    )


def _flat(states: States) -> Tensor:
    """All bytes of the arena: gaps and neighbours must stay as they were."""
    size = states.view.untyped_storage().nbytes() // states.view.dtype.itemsize
    return states.view.as_strided((size,), (1,), 0)


@pytest.mark.parametrize("isa", available_cpu_isas())
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_chunks(name: str, dtype: torch.dtype, isa: str) -> None:
    set_cpu_isa(isa)
    case = CASES[name](dtype)
    length = 130
    whole_states = make_states(case.state_shape, case.state_dtype, [0])
    whole = case.run(ops, [length], [0], whole_states, slice(0, length))
    for chunk in (1, 2, 3, 5, 17, 64):
        states = make_states(case.state_shape, case.state_dtype, [0])
        parts = []
        for begin in range(0, length, chunk):
            end = min(begin + chunk, length)
            parts.append(case.run(ops, [end - begin], [begin], states, slice(begin, end)))
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(states.view[0], whole_states.view[0])


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_other_rows_or_threads(name: str) -> None:
    case = CASES[name](torch.float32)
    torch.set_num_threads(1)
    states = make_states(case.state_shape, case.state_dtype, NUM_COMPUTED)
    start = states.copy()
    whole = case.run(ops, LENGTHS, NUM_COMPUTED, states, slice(0, sum(LENGTHS)))
    bounds = cumulative(LENGTHS).tolist()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        again = start.copy()
        out = case.run(ops, LENGTHS, NUM_COMPUTED, again, slice(0, sum(LENGTHS)))
        assert torch.equal(out, whole)
        for row, length in enumerate(LENGTHS):
            own = start.copy()
            alone = States(view=own.view, offsets=own.offsets[row : row + 1])
            part = slice(bounds[row], bounds[row + 1])
            out = case.run(ops, [length], [NUM_COMPUTED[row]], alone, part)
            assert torch.equal(out, whole[part])
            offset = int(alone.offsets[0])
            torch.testing.assert_close(
                own.view[offset], states.view[offset], rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("isa", available_cpu_isas())
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("shape", [(3, 2, 64), (1, 5, 19), (7, 1, 33)])
def test_gated_norm_equals_the_twin(
    shape: tuple[int, int, int], gate_first: bool, dtype: torch.dtype, isa: str
) -> None:
    set_cpu_isa(isa)
    tokens, groups, size = shape
    x, gate = (random_rows(tokens, groups * size + 3, dtype=dtype, seed=s) for s in (1, 2))
    x, gate = x[:, 1:-2], gate[:, 3:]
    for num_weights in (size, groups * size):
        weight = random_rows(num_weights, dtype=dtype, seed=3)
        actual, expected = poisoned(x.shape, dtype), poisoned(x.shape, dtype)
        ops.gated_rms_norm(actual, x, gate, weight, 1e-6, size, gate_first)
        naive.gated_rms_norm(expected, x, gate, weight, 1e-6, size, gate_first)
        rtol, atol = TOLERANCE[dtype]
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
        for token in range(tokens):
            alone = poisoned((1, groups * size), dtype)
            row = slice(token, token + 1)
            ops.gated_rms_norm(alone, x[row], gate[row], weight, 1e-6, size, gate_first)
            assert torch.equal(alone[0], actual[token])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_gates_equal_the_twin(dtype: torch.dtype) -> None:
    a, b = (random_rows(9, 7, dtype=dtype, seed=s, scale=8.0) for s in (1, 2))
    a[0, 0], b[0, 0], a[1, 0] = 60.0, -90.0, -60.0
    a_log, dt_bias = (random_rows(7, dtype=torch.float32, seed=s) for s in (3, 4))
    made = [poisoned(a.shape, torch.float32) for _ in range(4)]
    ops.delta_rule_gates(made[0], made[1], a, b, a_log, dt_bias)
    naive.delta_rule_gates(made[2], made[3], a, b, a_log, dt_bias)
    torch.testing.assert_close(made[0], made[2], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(made[1], made[3], rtol=1e-5, atol=1e-7)


def test_no_rows_is_no_work() -> None:
    for make in CASES.values():
        case = make(torch.float32)
        states = make_states(case.state_shape, case.state_dtype, [0])
        empty = States(view=states.view, offsets=states.offsets[:0])
        assert case.run(ops, [], [], empty, slice(0, 0)).shape[0] == 0
        assert states.view.isnan().all()


def test_wrong_arguments_are_named() -> None:
    case = delta_case(torch.float32, 2, 4, 16, 16)
    states = make_states(case.state_shape, torch.float32, [0, 0])
    outside = States(view=states.view, offsets=torch.tensor([0, 1 << 20], dtype=torch.int32))
    with pytest.raises(ShapeError, match="state_offsets"):
        case.run(ops, [1, 2], [0, 0], outside, slice(0, 3))
    with pytest.raises(ShapeError, match="cu_query_lens"):
        case.run(ops, [1, 2], [0, 0], states, slice(0, 4))
    with pytest.raises(ShapeError, match="num_computed"):
        case.run(ops, [1, 2], [0], states, slice(0, 3))
    with pytest.raises(ShapeError, match="multiple"):
        delta_case(torch.float32, 2, 3, 16, 16).run(ops, [1], [0], states, slice(0, 1))
    with pytest.raises(ShapeError, match="at most 256"):
        delta_case(torch.float32, 1, 1, 257, 16).run(ops, [1], [0], states, slice(0, 1))
    conv = conv_case(torch.float32, 8, 9, bias=False, silu=False)
    states = make_states(conv.state_shape, torch.float32, [0])
    with pytest.raises(ShapeError, match="taps"):
        conv.run(ops, [1], [0], states, slice(0, 1))
