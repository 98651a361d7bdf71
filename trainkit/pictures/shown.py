"""Say in lines of the plan how pictures are read: what is not seen, what deep greys mean."""

from collections import Counter
from typing import Any

from trainkit.pictures.files import LONG, SEVERAL
from trainkit.pictures.flags import Fit


def describe_reading(forms: Counter[str], reading: dict[str, Any]) -> dict[str, str]:
    """Return lines of the plan about pictures.

    forms: how many pictures are of which size and mode. reading: "fit" and "greys", see sets.Split.
    """
    plan = describe_fit(forms, reading["fit"])
    several = sum(number for form, number in forms.items() if form.endswith(SEVERAL))
    if several:
        plan["several"] = (
            f"{several} of {forms.total()} files hold several pictures, such as animations: of "
            "each the first is read"
        )
    greys = [
        f"{'any mode' if kind == 'any' else f'mode {kind}'}: {low:g} is black and {high:g} is white"
        for kind, (low, high) in reading["greys"].items()
    ]
    if greys:
        plan["greys"] = f"of more than 8 bits, {', '.join(greys)} (--grey-range)"
    return plan


def describe_fit(forms: Counter[str], fit: Fit | None) -> dict[str, str]:
    """Return a line of the plan if not all pictures are square. See files.read_centre for `fit`."""
    num_other = num_padded = 0
    area_cut = 0.0
    for form, number in forms.items():
        width, height = (int(side) for side in form.split()[:3:2])
        short, longer = min(width, height), max(width, height)
        num_other += number * (longer != short)
        if fit is None and longer > LONG * short:
            num_padded += number
        elif fit in (None, "crop"):
            area_cut += number * (1 - short / longer)
    if not num_other:
        return {}
    parts = []
    if fit in ("pad", "squash"):
        parts.append("all are padded to squares" if fit == "pad" else "all are squashed to squares")
    if area_cut:
        parts.append(f"the centre squares are read, {area_cut / forms.total():.1%} is cut off")
    if num_padded:
        parts.append(f"{num_padded} beyond {LONG} : 1 are padded to squares")
    text = f"{num_other} of {forms.total()} pictures are not square: {'; '.join(parts)} (--fit)"
    return {"fit": text}
