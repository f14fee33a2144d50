"""Reads what ops there are, and in which form, from the sources that define and compute them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.utils.source_tree import ROOT

_CALL = re.compile(r"VLLM_OPS(?:_IMPL)?\((\w+)|m\.def\(|m\.impl\(")
_STRINGS = re.compile(r'\s*((?:"(?:[^"\\]|\\.)*"\s*)+)')
_BOX = re.compile(r'\s*"(\w+)",\s*TORCH_BOX\(&([\w:]+)')
_TRITON = ROOT / "vllm" / "_custom_ops" / "triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """What one source says of one op.

    Attributes:
        place: the source below the root, for messages.
        namespace: of torch, "_C" or "_C_cache_ops".
        schema: as it is registered.
    """

    place: str
    namespace: str
    schema: torch.FunctionSchema

    @property
    def arguments(self) -> Mapping[str, str]:
        """Names, in their order, and types."""
        return {argument.name: str(argument.type) for argument in self.schema.arguments}

    @property
    def written(self) -> frozenset[str]:
        """Names of the arguments that it writes to."""
        infos = {a.name: a.alias_info for a in self.schema.arguments}
        return frozenset(n for n, info in infos.items() if info is not None and info.is_write)


@dataclass(frozen=True, slots=True, kw_only=True)
class CppFunction:
    """What computes an op in C++; parameters are (type, name)."""

    place: str
    op: str
    parameters: tuple[tuple[str, str], ...]


@functools.cache
def list_ops() -> tuple[Op, ...]:
    """Return every op of the C++ sources and of the tables of Triton's modules."""
    ops = []
    for path, text in _read_cpp():
        namespace = ""
        for call in _CALL.finditer(text):
            if call[1]:
                namespace = call[1]
            elif call[0] == "m.def(":
                strings = _STRINGS.match(text, call.end())
                assert strings is not None, path
                ops.append(_make_op(path, namespace, ast.literal_eval(f"({strings[1]})")))
    for path in sorted(_TRITON.glob("*.py")):
        schemas = _read_table(ast.parse(path.read_text()), "SCHEMAS")
        for schema in () if schemas is None else ast.literal_eval(schemas).values():
            ops.append(_make_op(path, "_C", schema))
    return tuple(ops)


@functools.cache
def list_triton_functions() -> Mapping[str, ast.FunctionDef]:
    """Return the function of each op that Triton serves."""
    functions = {}
    for path in sorted(_TRITON.glob("*.py")):
        tree = ast.parse(path.read_text())
        table = _read_table(tree, "OPS")
        for op, function in () if table is None else zip(table.keys, table.values, strict=True):
            assert isinstance(op, ast.Constant) and isinstance(function, ast.Name)
            functions[str(op.value)] = _find_function(tree, function.id)
    return functions


@functools.cache
def list_cpp_functions() -> tuple[CppFunction, ...]:
    """Return the function of each op that C++ serves on some device."""
    functions = []
    for path, text in _read_cpp():
        for call in _CALL.finditer(text):
            box = _BOX.match(text, call.end()) if call[0] == "m.impl(" else None
            if box is not None:
                name = box[2].split("::")[-1]
                found = re.findall(rf"\b{name}\(([^(){{}};]*)\)\s*{{", text)
                assert len(found) == 1, f"{path}: {name} is defined {len(found)} times"
                pairs = [part.strip().rpartition(" ") for part in found[0].split(",") if part]
                parameters = tuple((kind, parameter) for kind, _, parameter in pairs)
                place = str(path.relative_to(ROOT))
                functions.append(CppFunction(place=place, op=box[1], parameters=parameters))
    return tuple(functions)


def _read_cpp() -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in (".cpp", ".cu"):
            yield path, path.read_text()


def _make_op(path: Path, namespace: str, schema: str) -> Op:
    place = str(path.relative_to(ROOT))
    return Op(place=place, namespace=namespace, schema=torch._C.parse_schema(schema))


def _read_table(tree: ast.Module, name: str) -> ast.Dict | None:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id == name:
                return node.value
    return None


def _find_function(tree: ast.Module, name: str) -> ast.FunctionDef:
    """Return a function that a module defines or imports."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            assert node.module is not None
            path = ROOT / Path(*node.module.split(".")).with_suffix(".py")
            return _find_function(ast.parse(path.read_text()), name)
    raise AssertionError(f"{name} is not defined")
