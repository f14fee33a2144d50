"""What Triton says nothing about: names in a kernel's decorator, parameters that it never reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.python_source import list_functions, list_modules
from tests.architecture.test_sizes import is_kernel

KERNELS = {
    f"{module.name.rpartition('.')[2]}.{name}": function
    for module in list_modules()
    if module.name.startswith("vllm._custom_ops.triton.")
    for name, function in list_functions(module.tree)
    if is_kernel(function)
}


def list_unspecialized(kernel: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the names that a decorator lists itself; several kernels share a table of others."""
    for decorator in kernel.decorator_list:
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
            is_list = isinstance(keyword.value, ast.List)
            if is_list and (keyword.arg or "").startswith("do_not_specialize"):
                yield from ast.literal_eval(keyword.value)


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_not_specialized_is_a_parameter(name: str) -> None:
    parameters = {p.arg: ast.unparse(p.annotation or p) for p in KERNELS[name].args.args}
    for listed in list_unspecialized(KERNELS[name]):
        assert listed in parameters, f"{name} has no {listed}: it is compiled anew for its values"
        assert "constexpr" not in parameters[listed], f"{name} is compiled for values of {listed}"


@pytest.mark.parametrize("name", KERNELS)
def test_every_parameter_is_read(name: str) -> None:
    kernel = KERNELS[name]
    read = {n.id for line in kernel.body for n in ast.walk(line) if isinstance(n, ast.Name)}
    unread = {p.arg for p in kernel.args.args} - read
    assert not unread, f"{name} never reads {', '.join(sorted(unread))}"
