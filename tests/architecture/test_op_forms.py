"""An op has one form: what its schema says, its door gives, and C++ or Triton takes.

Arguments are given by place, so that two of one type which are swapped anywhere would be found by
nobody but a test of the numbers. Doors and naive twins are compared in `test_ops.py`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import TypeGuard

import pytest

from tests.architecture.python_source import list_functions, list_modules
from tests.utils.op_schemas import (
    CppFunction,
    Op,
    list_cpp_functions,
    list_ops,
    list_triton_functions,
)

OPS = {op.schema.name: op for op in list_ops()}

OTHER_NAMES = {
    ("decoder_layers", "stack"): "handle",  # the object that holds the stack has a tensor for it
    ("fused_experts", "w13_packed"): "w13",  # a GPU's weights are plain
    ("fused_experts", "w2_packed"): "w2",
    ("pack_linear_weight", "packed"): "out",
}
"""What an argument of an op is called where it is given or taken by another name."""

PYTHON_TYPES = {
    "Tensor": "Tensor",
    "Optional[Tensor]": "Tensor | None",
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
}
CPP_TYPES = {
    "Tensor": "const Tensor&",
    "Optional[Tensor]": "const std::optional<Tensor>&",
    "int": "int64_t",
    "float": "double",
    "bool": "bool",
    "str": "const std::string&",
    "List[Tensor]": "const std::vector<Tensor>&",
    "List[int]": "const std::vector<int64_t>&",
    "List[float]": "const std::vector<double>&",
}


def strip_axes(name: str) -> str:
    """Return a name without the letters of its axes."""
    return re.sub(r"_[A-Z0-9]+$", "", name)


def is_name_of(name: str, op: str, argument: str) -> bool:
    """Whether an argument of an op may be called so."""
    return strip_axes(name) in (argument, OTHER_NAMES.get((op, argument)))


def is_op(function: ast.expr) -> TypeGuard[ast.Attribute]:
    """Whether what is called is an op of `library.py`."""
    return isinstance(function, ast.Attribute) and ast.unparse(function.value) in ("C", "CACHE_OPS")


def list_calls() -> Iterator[tuple[str, str, ast.FunctionDef | ast.AsyncFunctionDef, ast.Call]]:
    """Yield place, op, door and call of every call of an op."""
    for module in list_modules():
        if not module.name.startswith("vllm._custom_ops."):
            continue
        for name, door in list_functions(module.tree):
            for node in ast.walk(door):
                if isinstance(node, ast.Call) and is_op(node.func):
                    yield f"{module.place}:{name}", node.func.attr, door, node


CALLS = list(list_calls())


def test_an_op_is_defined_once() -> None:
    counts = Counter(op.schema.name for op in list_ops())
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("op", list_ops(), ids=lambda op: op.schema.name)
def test_an_op_that_returns_nothing_writes_something(op: Op) -> None:
    if not op.schema.returns and any("Tensor" in kind for kind in op.arguments.values()):
        assert op.written, f"{op.place}: {op.schema} marks no argument as written"


@pytest.mark.parametrize(("place", "op", "door", "call"), CALLS, ids=[c[1] for c in CALLS])
def test_a_door_gives_every_argument_its_place(
    place: str, op: str, door: ast.FunctionDef, call: ast.Call
) -> None:
    assert not call.keywords, f"{place} gives {op} arguments by name"
    wanted = OPS[op].arguments
    assert len(call.args) == len(wanted), f"{place} gives {len(call.args)}: {OPS[op].schema}"
    own = {arg.arg: ast.unparse(arg.annotation) for arg in door.args.args if arg.annotation}
    for given, (argument, kind) in zip(call.args, wanted.items(), strict=True):
        if not isinstance(given, ast.Name | ast.Attribute):
            continue  # it is made there
        name = ast.unparse(given).rpartition(".")[2]
        assert is_name_of(name, op, argument), f"{place} gives {op} {name} as {argument}"
        if isinstance(given, ast.Name) and kind in PYTHON_TYPES:
            found = own.get(name, PYTHON_TYPES[kind])
            fits = found in (PYTHON_TYPES[kind], PYTHON_TYPES[kind].removesuffix(" | None"))
            assert fits or name == "out", f"{place}: {name} is {found}, in the op {kind}"


@pytest.mark.parametrize("op", list_triton_functions())
def test_a_triton_function_has_the_form_of_its_op(op: str) -> None:
    function, wanted = list_triton_functions()[op], OPS[op].arguments
    assert not (function.args.kwonlyargs or function.args.vararg or function.args.posonlyargs)
    found = {arg.arg: ast.unparse(arg.annotation or arg) for arg in function.args.args}
    assert len(found) == len(wanted), f"{op} takes {len(found)}: {OPS[op].schema}"
    for (name, kind), (argument, wanted_kind) in zip(found.items(), wanted.items(), strict=True):
        assert is_name_of(name, op, argument), f"{op} takes {name} as {argument}"
        assert kind == PYTHON_TYPES[wanted_kind], f"{op}: {name} is {kind}, in the op {wanted_kind}"


@pytest.mark.parametrize("function", list_cpp_functions(), ids=lambda f: f"{f.place}:{f.op}")
def test_a_cpp_function_has_the_form_of_its_op(function: CppFunction) -> None:
    wanted = OPS[function.op].arguments
    found = [kind for kind, _ in function.parameters]
    assert found == [CPP_TYPES[kind] for kind in wanted.values()], OPS[function.op].schema
    for (_, name), argument in zip(function.parameters, wanted, strict=True):
        assert name == argument or name not in wanted, f"{name} stands in the place of {argument}"
