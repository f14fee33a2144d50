"""Checks of request fields: each returns the value in one form or says what is allowed.

Used by `vllm/sampling_params.py`. Every error is a RequestError that names the field.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from vllm.errors import RequestError


def to_builtin(value: Any) -> Any:
    """Return Python's own form of a number of another library, such as numpy; others unchanged."""
    if value is None or isinstance(value, (int, float, str, list, dict)):
        return value  # the usual ones: asking an abstract class takes longer
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    """Raise RequestError unless `value` is an integer from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    if value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise RequestError(f"{name} must be at least {low}{upper}, got {value}", param=name)


def check_range(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    """Raise RequestError unless `value` is a finite number from `low` to `high`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        allowed = _describe_range(low, high, open_low=open_low)
        raise RequestError(f"{name} must be {allowed}, got {value!r}", param=name)
    is_low = value <= low if open_low else value < low
    if math.isnan(value) or math.isinf(value) or is_low or value > high:
        allowed = _describe_range(low, high, open_low=open_low)
        raise RequestError(f"{name} must be {allowed}, got {value}", param=name)


def _describe_range(low: float, high: float, *, open_low: bool) -> str:
    if math.isinf(low):
        return "a finite number"
    if math.isinf(high):
        return f"a finite number {'above' if open_low else 'of at least'} {low:g}"
    return f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"


def check_not_empty(name: str, ids: Sequence[int] | None) -> None:
    """Raise RequestError if `ids`, of which one is to be chosen, holds none; None is any."""
    if ids is not None and len(ids) == 0:
        raise RequestError(
            f"{name} is empty, so no token could be chosen; give at least one id", param=name
        )


def is_switch(value: object) -> bool:
    """Return whether something is a truth value (numpy's, too, which is no number), or 0 or 1."""
    return isinstance(value, Hashable) and value in (0, 1)


def parse_switch(value: object, name: str) -> bool:
    """Return a truth value, of what `is_switch` takes; text is none."""
    if is_switch(value):
        return bool(value)
    raise RequestError(f"{name} must be True or False, got {value!r}", param=name)


def check_text(value: object, name: str) -> None:
    """Raise RequestError unless `value` is text or None."""
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name} must be text, got {value!r}", param=name)


def parse_callables(value: Any, name: str) -> list[Callable[..., Any]] | None:
    """Return a list of functions, from several or from None, which stays."""
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and all(callable(one) for one in value):
        return list(value)
    raise RequestError(f"{name} must be a list of functions, got {value!r}", param=name)


def parse_count(value: int | bool | None) -> int | None:
    """Return a count; True is 1, False is None."""
    return 1 if value is True else None if value is False else value


def parse_list(value: Any, name: str, item: type) -> list[Any] | None:
    """Return a list of `item`, from several or from None, which stays."""
    if value is None:
        return None
    items = [to_builtin(v) for v in value] if isinstance(value, (list, tuple, set)) else None
    if items is None or not all(isinstance(v, item) and not isinstance(v, bool) for v in items):
        hint = f"; write [{value!r}]" if isinstance(value, item) else ""
        words = {int: "integers", str: "texts"}[item]
        raise RequestError(f"{name} must be a list of {words}, got {value!r}{hint}", param=name)
    return items


def parse_token_keys(bias: Mapping[Any, float] | None) -> dict[int, float] | None:
    """Return a bias by token id, from ids as numbers or as text."""
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise RequestError(
            f"logit_bias must be a dict of token id to number, got {bias!r}", param="logit_bias"
        )
    result = {}
    for key, value in bias.items():
        try:
            result[int(key)] = value
        except (TypeError, ValueError):
            raise RequestError(
                f"logit_bias is keyed by token id, got {key!r}", param="logit_bias"
            ) from None
    return result


def parse_bias(bias: Mapping[Any, float] | None) -> dict[int, float] | None:
    """Return a bias by token id, its values clamped to [-100, 100]."""
    checked = parse_token_keys(bias)
    if checked is None:
        return None
    checked = {token_id: to_builtin(value) for token_id, value in checked.items()}
    for token_id, value in checked.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isnan(value):
            raise RequestError(
                f"logit_bias of token {token_id} must be a number, got {value!r}",
                param="logit_bias",
            )
    return {i: min(100.0, max(-100.0, float(v))) for i, v in checked.items()}


def parse_json_schema(value: Any) -> str | dict[str, Any] | None:
    """Return a JSON schema as text or dict; a pydantic class or object stands for its own."""
    if value is None or isinstance(value, (str, dict)):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "model_json_schema"):  # a pydantic class or object
        schema: dict[str, Any] = value.model_json_schema()
        return schema
    raise RequestError(
        f"guided_json must be text, a dict or a pydantic model, got {value!r}", param="guided_json"
    )


def parse_eos_ids(value: int | list[int] | None) -> list[int]:
    """Return the end tokens that a config's `eos_token_id` names: none, one or several."""
    return [value] if isinstance(value, int) else list(value or ())
