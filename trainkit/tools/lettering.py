"""Draw names as they are written: no TeX, and letters of any script that an installed font has."""

import os
import sys
import unicodedata
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from textwrap import fill, shorten
from typing import Any

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

OWN = "DejaVu Sans"  # which matplotlib brings along
# Beginnings of the names of fonts made for many scripts: they are tried before all others.
USUAL = (
    *("Noto Sans CJK", "Noto Sans", "Source Han Sans", "WenQuanYi", "Droid Sans Fallback"),
    *("Microsoft YaHei", "SimHei", "PingFang", "Hiragino Sans", "Heiti", "Malgun Gothic"),
    *("Yu Gothic", "MS Gothic", "Nirmala UI", "Lohit", "Arial Unicode MS", "FreeSans", "Unifont"),
)
BOXES = ("Last Resort", "Adobe Blank", "Unicode BMP Fallback")  # a box for each letter there is
UNKNOWN: set[str] = set()  # letters that no font has; the user was told
# Instead of a warning for each letter there is one line for all of them.
warnings.filterwarnings("ignore", r"Glyph \d+ ")


def as_written(texts: Iterable[str]) -> dict[str, Any]:
    """Return options of matplotlib's texts for names that come from data.

    Prints one line if no installed font has some of their letters.
    """
    letters = frozenset(letter for text in texts for letter in text if is_drawn(letter))
    return {"parse_math": False, "fontfamily": list(find_families(letters))}


def is_drawn(letter: str) -> bool:
    """Return whether a letter needs a glyph: spaces, controls and variation selectors do not."""
    is_selector = "\ufe00" <= letter <= "\ufe0f"
    return unicodedata.category(letter) not in ("Cc", "Cf", "Zs", "Zl", "Zp") and not is_selector


@cache
def find_families(letters: frozenset[str]) -> tuple[str, ...]:
    """Return the names of fonts that together have these letters, the usual one first."""
    families = [OWN]
    missing = letters - letters_of(font_manager.findfont(OWN), 0)
    for known_again in (False, True):
        if missing and known_again:
            read_new_fonts()
        for font in list_fonts() if missing else ():
            if found := missing & letters_of(font.fname, getattr(font, "index", 0)):
                families.append(font.name)
                missing -= found
    if new := missing - UNKNOWN:
        UNKNOWN.update(new)
        some = " ".join(sorted(new)[:5])
        print(
            f"no installed font has {some}{' and others' if len(new) > 5 else ''}: boxes are "
            "drawn in their place (install a font that has them, such as Noto Sans CJK)",
            file=sys.stderr,
        )
    return tuple(families)


def list_fonts() -> list[Any]:
    """Return the upright installed fonts of usual weight, those of USUAL first."""
    fonts = [
        font
        for font in font_manager.fontManager.ttflist
        if font.style == "normal" and font.weight in (400, "normal", "regular", "book")
        if not font.name.startswith(BOXES)
    ]

    def order(font: Any) -> tuple[int, str]:
        ranks = [rank for rank, name in enumerate(USUAL) if font.name.startswith(name)]
        return min(ranks, default=len(USUAL)), font.name

    return sorted(fonts, key=order)


def read_new_fonts() -> None:
    """Add fonts that were installed after matplotlib made its list, which it keeps for good."""
    known = {os.path.realpath(font.fname) for font in font_manager.fontManager.ttflist}
    for path in font_manager.findSystemFonts():
        if os.path.realpath(path) not in known:
            with suppress(Exception):  # a font that matplotlib cannot use
                font_manager.fontManager.addfont(path)


@cache
def letters_of(path: str, index: int) -> frozenset[str]:
    """Return the letters of a font file. Of one that cannot be read: none."""
    with suppress(Exception):
        # matplotlib 3.10 and before read the first face of a file alone.
        face: dict[str, Any] = {"face_index": index} if index else {}
        return frozenset(map(chr, FT2Font(path, **face).get_charmap()))
    return frozenset()


def width_of(text: str) -> int:
    """Return how wide a text is drawn, in letters of Latin: those of Chinese count twice."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def cut(text: str, most: int) -> str:
    """Return a text on one line, at most this wide, cut between words if it has any."""
    text = " ".join(text.split())
    if width_of(text) <= most:
        return text
    words = shorten(text, most, placeholder=" ...")
    if width_of(words) <= most and words != "...":
        return words
    while width_of(text) > most - 3:
        text = text[:-1]
    return f"{text}..."


def wrap(text: str, most: int) -> str:
    """Return a text in lines that are at most this wide."""
    filler = "\0"  # beside each letter that is as wide as two
    wide = "".join(letter + filler * (width_of(letter) - 1) for letter in text)
    return fill(wide, most).replace(filler, "")
