"""JSON that every reader accepts: the standard has neither NaN nor infinity, which json writes."""

import json
import math
from typing import Any


def to_json(value: Any, **options: Any) -> str:
    """json.dumps, with null for NaN, and "inf" or "-inf" for infinity."""
    return json.dumps(_replaced(value), allow_nan=False, **options)


def as_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A row of numbers that to_json wrote, with NaN and infinity as floats again."""
    shown = {None: math.nan, "inf": math.inf, "-inf": -math.inf}
    return {n: shown.get(x, x) if x is None or isinstance(x, str) else x for n, x in row.items()}


def from_exact_json(text: str) -> Any:
    """The metadata in a safetensors file of a run; NaN and infinity are as Python writes them."""
    return json.loads(text)


def _replaced(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(float(value))
    if isinstance(value, dict):
        return {key: _replaced(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item) for item in value]
    return value
