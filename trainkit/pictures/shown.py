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
    num_long = num_other = 0
    area_cut = 0.0
    for form, number in forms.items():
        width, height = (int(side) for side in form.split()[:3:2])
        short, longer = min(width, height), max(width, height)
        is_long = longer > LONG * short
        num_long += number * is_long
        num_other += number * (longer != short)
        if fit == "crop" or (fit is None and not is_long):
            area_cut += number * (1 - short / longer)
    if not num_other:
        return {}
    longs = f"{num_long} of {forms.total()} pictures, whose sides are beyond {LONG} : 1,"
    parts = []
    if area_cut:
        share = max(area_cut / forms.total(), 0.001)
        parts.append(
            f"the centre squares are read: {share:.1%} of the pictures' area is cut off (--fit pad "
            "or squash keeps it)"
        )
    if fit is None and num_long:
        parts.append(f"{longs} are padded to squares (--fit)")
    elif fit in ("pad", "squash"):
        how = "padded" if fit == "pad" else "squashed"
        parts.append(f"all of each picture, {how} to a square: {num_other} are not square")
    if fit == "squash" and num_long:
        parts.append(f"{longs} change much (--fit pad keeps their shape)")
    return {"fit": "; ".join(parts)}
