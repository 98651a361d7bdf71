"""JSON that every reader accepts: the standard has neither NaN nor infinity, which json writes."""

import json
import math
from typing import Any


def to_json(value: Any, **options: Any) -> str:
    """json.dumps, with null for NaN, and "inf" or "-inf" for infinity."""
    return json.dumps(_replaced(value, is_exact=False), allow_nan=False, **options)


def to_exact_json(value: Any, **options: Any) -> str:
    """json.dumps, with {"float": "nan"}, "inf" or "-inf" there, which from_exact_json undoes."""
    return json.dumps(_replaced(value, is_exact=True), allow_nan=False, **options)


def from_exact_json(text: str) -> Any:
    """Undo to_exact_json."""

    def restore(content: dict[str, Any]) -> Any:
        if [*content] != ["float"]:
            return content
        inner = content["float"]  # a list, if it was a dict with this one key before
        return {"float": inner[0]} if isinstance(inner, list) else float(inner)

    return json.loads(text, object_hook=restore)


def as_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A row of numbers that to_json wrote, with NaN and infinity as floats again."""
    shown = {None: math.nan, "inf": math.inf, "-inf": -math.inf}
    return {n: shown.get(x, x) if x is None or isinstance(x, str) else x for n, x in row.items()}


def _replaced(value: Any, is_exact: bool) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        name = str(float(value))
        return {"float": name} if is_exact else None if name == "nan" else name
    if isinstance(value, dict):
        items = {key: _replaced(item, is_exact) for key, item in value.items()}
        return {"float": [items["float"]]} if is_exact and [*items] == ["float"] else items
    if isinstance(value, list | tuple):
        return [_replaced(item, is_exact) for item in value]
    return value
