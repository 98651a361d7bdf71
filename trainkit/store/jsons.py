"""JSON that every reader accepts: the standard has neither NaN nor infinity, which json writes."""

import json
import math
from collections.abc import Callable
from typing import Any


def to_json(value: Any, **options: Any) -> str:
    """json.dumps, with null for NaN, and "inf" or "-inf" for infinity."""
    return json.dumps(_replaced(value, _shown), allow_nan=False, **options)


def to_exact_json(value: Any, **options: Any) -> str:
    """json.dumps, with {"float": "nan"}, "inf" or "-inf" there, which from_exact_json undoes."""
    return json.dumps(_replaced(value, lambda x: {"float": str(x)}), allow_nan=False, **options)


def from_exact_json(text: str) -> Any:
    """Undo to_exact_json."""

    def restore(content: dict[str, Any]) -> Any:
        name = content.get("float")
        return float(name) if [*content] == ["float"] and name in _NAMES else content

    return json.loads(text, object_hook=restore)


def as_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A row of numbers that to_json wrote, with NaN and infinity as floats again."""
    shown = {None: math.nan, "inf": math.inf, "-inf": -math.inf}
    return {n: shown.get(x, x) if x is None or isinstance(x, str) else x for n, x in row.items()}


_NAMES = ("nan", "inf", "-inf")


def _shown(value: float) -> str | None:
    return None if math.isnan(value) else str(value)


def _replaced(value: Any, replace: Callable[[float], Any]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return replace(float(value))
    if isinstance(value, dict):
        return {key: _replaced(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, replace) for item in value]
    return value
