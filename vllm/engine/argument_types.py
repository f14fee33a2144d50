"""Whether arguments of the Python API are of the kind that their fields say.

The command line parses its flags; keywords come as they are. Text would pass as a switch ("false"
is true), or fail far inside as a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError

_TEXT = {"str", "None"}
_SWITCH = {"bool", "None"}
_NUMBER = {"int", "float", "None"}


def check_argument_types(args: EngineArgs) -> None:
    """Look at every field; paths, classes and enumerations pass as text.

    Raises:
        ConfigError: text where a switch or a number belongs, or the other way round.
    """
    for field in fields(args):
        kinds = set(str(field.type).split(" | "))
        value = getattr(args, field.name)
        if value is None and "None" in kinds:
            continue
        if kinds <= _SWITCH:
            is_fit, wanted = isinstance(value, (bool, int)), "True or False"
        elif kinds <= _NUMBER:
            is_fit, wanted = not isinstance(value, (str, Mapping, list)), "a number"
        elif kinds <= _TEXT:
            is_fit, wanted = not isinstance(value, (bool, int, float, Mapping, list)), "text"
        else:
            continue
        if not is_fit:
            raise ConfigError(f"{field.name} must be {wanted}, got {value!r}")
