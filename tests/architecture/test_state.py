"""No hidden state: no `global`, no mutable class attributes, no questions about kinds of cache.

An exception is a line below with its reason.
"""

from __future__ import annotations

import ast

from tests.architecture.python_source import list_modules

GLOBALS: dict[str, str] = {}
"""module:name -> reason of a `global` statement."""

SHARED_TABLES: dict[str, str] = {
    "vllm/entrypoints/openai/tool_parsers/abstract.py:ToolParserManager.tool_parsers": (
        "0.6.3's interface: users register their parsers on the class"
    ),
}
"""module:class.attribute -> reason of a mutable class attribute."""

MUTABLE_CALLS = ("dict", "list", "set", "defaultdict", "deque", "OrderedDict", "Counter")


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id in MUTABLE_CALLS
    return False


def is_message(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base) in ("msgspec.Struct", "BaseModel") for base in node.bases)


def test_no_global_statements() -> None:
    found = {
        f"{module.place}:{name}"
        for module in list_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Global)
        for name in node.names
    }
    assert found == GLOBALS.keys()


def test_no_mutable_class_attributes() -> None:
    """A default of a message is copied for each instance by msgspec and pydantic."""
    found = set()
    for module in list_modules():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef) or is_message(node):
                continue
            for item in node.body:
                if isinstance(item, ast.Assign | ast.AnnAssign) and is_mutable(item.value):
                    target = item.target if isinstance(item, ast.AnnAssign) else item.targets[0]
                    found.add(f"{module.place}:{node.name}.{ast.unparse(target)}")
    assert found == SHARED_TABLES.keys()


def test_no_isinstance_on_cache_specs_outside_their_owners() -> None:
    """Ask the object instead; only core/block and the groupings tell lifetimes apart."""
    found = [
        f"{module.place}:{node.lineno}"
        for module in list_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and isinstance(node.args[0], ast.Name)
        and node.args[0].id == "spec"
        and not module.place.startswith(("vllm/core/block/", "vllm/hybrid/"))
    ]
    assert found == []
