"""Brings arguments of the Python API to the kind that their fields say.

The command line parses its flags; keywords come as they are. Text would pass as a switch ("false"
is true), or fail far inside as a number, as some of numpy's do. Called by `engine/arg_utils.py`
whenever arguments are made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Integral, Number, Real
from typing import TYPE_CHECKING

from vllm.errors import ConfigError
from vllm.utils.field_checks import is_switch, to_builtin

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    """Paths, classes and enumerations pass; None has a name of its own."""
    is_other = isinstance(value, (int, float, Mapping, list, tuple, set))
    return value is not None and not is_other


_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "bool": ("True, False", is_switch),
    "int": ("a whole number", _is_whole),
    "float": ("a number", _is_number),
    "str": ("text", _is_text),
    "list": ("a list", lambda value: isinstance(value, (list, tuple))),
    "tuple": ("a tuple", lambda value: isinstance(value, (list, tuple))),
    "dict": ("a dict", lambda value: isinstance(value, Mapping)),
    "type": ("a class", lambda value: isinstance(value, type)),
    "None": ("None", lambda value: value is None),
}
"""Of each kind that a field's annotation may name: words for it, whether a value fits."""


def read_arguments(args: EngineArgs) -> None:
    """Give every field whose annotation is known here Python's own form of its value.

    Raises:
        ConfigError: a value is of none of the kinds that its field takes.
    """
    for field in fields(args):
        names = [kind.partition("[")[0] for kind in str(field.type).split(" | ")]
        if not _KINDS.keys() >= set(names):
            continue  # of a class derived from ours
        value = getattr(args, field.name)
        if not any(_KINDS[name][1](value) for name in names):
            words = ", ".join(_KINDS[name][0] for name in names)
            raise ConfigError(
                f"{field.name} must be {' or '.join(words.rsplit(', ', 1))}, got {value!r}"
            )
        setattr(args, field.name, _to_plain(value))


def _to_plain(value: object) -> object:
    """Return paths as text, and numbers and truth values of other libraries as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if is_switch(value) and not isinstance(value, Number):
        return bool(value)
    return to_builtin(value)
