"""How the pictures look: figures without a window, colours, and names as they are written."""

import warnings
from typing import Any

from matplotlib import font_manager
from matplotlib.figure import Figure

# Okabe and Ito's, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
# matplotlib's own, then those of other scripts that systems bring along. What none of them has is
# drawn as a box.
FONTS = (
    *("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC"),
    *("WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback", "Microsoft YaHei"),
    *("SimHei", "PingFang SC", "PingFang HK", "Hiragino Sans", "Heiti TC", "Malgun Gothic"),
    *("Yu Gothic", "MS Gothic", "Nirmala UI", "Arial Unicode MS", "FreeSans", "Unifont"),
)
warnings.filterwarnings("ignore", r"Glyph \d+ ")  # one for each letter that is drawn as a box


def as_written() -> dict[str, Any]:
    """Return options of matplotlib's texts for names that come from data: they are no formulas."""
    installed = {*font_manager.fontManager.get_font_names()}
    return {"parse_math": False, "fontfamily": [name for name in FONTS if name in installed]}


def new_figure(width: float, height: float) -> Figure:
    """Make a figure, in inches, that has no window and is not in matplotlib's global state."""
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def cut(text: str, most: int) -> str:
    """Return a text on one line, of at most so many letters."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."
