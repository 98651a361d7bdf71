"""Say how pictures are read: lines of the plan, and what predict.py needs to read them alike."""

from collections import Counter
from typing import Any

from trainkit.pictures import files
from trainkit.pictures.splits import Split


def how_read(*parts: Split) -> dict[str, Any]:
    """Return what predict.py needs to read pictures as those of a run were read, as JSON."""
    greys = {kind: ends for part in parts for kind, ends in part.how.get("greys", {}).items()}
    return {"fit": parts[0].how["fit"], "greys": greys}


def describe_reading(*parts: Split) -> dict[str, str]:
    """Return lines of the plan: what of the pictures is not seen, and how deep greys are read."""
    of_files = {part.path: part.forms for part in parts}  # held-out pictures are in the same file
    forms = sum(of_files.values(), Counter[str]())
    how = how_read(*parts)
    plan = describe_fit(forms, how["fit"])
    several = sum(number for form, number in forms.items() if form.endswith(files.SEVERAL))
    if several:
        plan["several"] = (
            f"{several} of {forms.total()} files hold several pictures, such as animations: of "
            "each the first is read"
        )
    greys = [
        f"{'any mode' if kind == 'any' else f'mode {kind}'}: {low:g} is black and {high:g} is white"
        for kind, (low, high) in how["greys"].items()
    ]
    if greys:
        plan["greys"] = f"of more than 8 bits, {', '.join(greys)} (--grey-range)"
    return plan


def describe_fit(forms: Counter[str], fit: files.Fit | None) -> dict[str, str]:
    """Return a line of the plan if not all pictures are square.

    forms: how many pictures are of which size and mode. fit: see files.read_centre.
    """
    num_long = num_other = 0
    area_cut = 0.0
    for form, number in forms.items():
        width, height = (int(side) for side in form.split()[:3:2])
        short, longer = min(width, height), max(width, height)
        if longer > files.LONG * short:
            num_long += number
        if longer != short:
            num_other += number
        if fit == "crop" or (fit is None and longer <= files.LONG * short):
            area_cut += number * (1 - short / longer)
    if not num_other:
        return {}
    share = area_cut / forms.total()
    longs = f"{num_long} of {forms.total()} pictures, whose sides are beyond {files.LONG} : 1,"
    parts = []
    if share:
        parts.append(
            f"the centre squares are read: {max(share, 0.001):.1%} of the pictures' area is cut "
            "off (--fit pad or squash keeps it)"
        )
    if fit is None and num_long:
        parts.append(f"{longs} are padded to squares (--fit)")
    elif fit == "pad":
        parts.append(f"all of each picture, padded to a square: {num_other} are not square")
    elif fit == "squash":
        parts.append(f"all of each picture, squashed to a square: {num_other} are not square")
        if num_long:
            parts.append(f"{longs} change much (--fit pad keeps their shape)")
    return {"fit": "; ".join(parts)}
