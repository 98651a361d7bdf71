"""Draw the README's pictures: the default run's terminal output, its curves and its mistakes.

    python -m benchmarks.pictures

The run is made in runs/readme, or taken from there if it is done. Lines longer than the picture are
broken between words, and the folder of this repository is left out of them.
"""

import subprocess
import sys
import textwrap

from matplotlib.figure import Figure
from PIL import Image

from benchmarks._runs import MNIST, ROOT

FOLDER = ROOT / "runs" / "readme"
PICTURES = ROOT / "docs" / "pictures"
COLUMNS, INDENT, DPI = 116, " " * 12, 100


def terminal_output() -> str:
    """What `python train_mnist.py` prints."""
    path = FOLDER / "terminal.txt"
    if not (FOLDER / "runs" / "mnist" / "DONE").exists() or not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([sys.executable, str(MNIST)], cwd=FOLDER,
                              stdout=subprocess.PIPE, text=True, check=True)  # fmt: skip
        path.write_text(done.stdout)
    return path.read_text().replace(f"{ROOT}/", "")


def draw_terminal(text: str) -> Figure:
    """Dark monospaced text on a light ground."""
    lines = ["$ python train_mnist.py"]
    for line in text.splitlines():
        lines += textwrap.wrap(line, COLUMNS, subsequent_indent=INDENT, drop_whitespace=True)
    width, height = 8 * COLUMNS + 32, 19 * len(lines) + 28  # pixels
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="#f6f6f3")
    for number, line in enumerate(lines):
        figure.text(16 / width, 1 - (18 + 19 * number) / height, line, family="monospace",
                    fontsize=13.2 * 72 / DPI, va="top", color="#1f1f1f")  # fmt: skip
    return figure


def main() -> None:
    text = terminal_output()
    PICTURES.mkdir(parents=True, exist_ok=True)
    draw_terminal(text).savefig(FOLDER / "runs" / "mnist" / "terminal.png")
    for name in ("terminal", "curves", "mistakes"):
        with Image.open(FOLDER / "runs" / "mnist" / f"{name}.png") as picture:
            small = picture.convert("RGB").quantize(32, dither=Image.Dither.NONE)
        small.save(PICTURES / f"{name}.png", optimize=True)
        print(f"{PICTURES / name}.png", (PICTURES / f"{name}.png").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
