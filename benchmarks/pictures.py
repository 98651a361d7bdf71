"""Draw the README's pictures: the default run's terminal output, its curves and its mistakes.

    python -m benchmarks.pictures

The output comes from a real terminal of 80 columns (util-linux's `script`). The path of this
repository is removed from it, and so is the progress bar, which disappears when an epoch ends.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from benchmarks._runs import MNIST, ROOT

COLUMNS, DPI = 80, 100


def draw_terminal(text: str) -> Figure:
    """Draw dark monospaced text on a light background."""
    lines = ["$ python train_mnist.py", *text.splitlines()]
    width, height = 8 * COLUMNS + 32, 19 * len(lines) + 28  # pixels
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="#f6f6f3")
    figure.text(
        16 / width,
        1 - 14 / height,
        "\n".join(lines),
        family="monospace",
        fontsize=13.2 * 72 / DPI,
        linespacing=1.39,
        verticalalignment="top",
        color="#1f1f1f",
    )
    return figure


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory, "runs", "mnist")
        shell = f"stty cols {COLUMNS}; {sys.executable} {MNIST}"
        command = ["script", "-qec", shell, "/dev/null"]
        shown = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
        text = "\n".join(line.rpartition("\r")[2] for line in shown.stdout.split("\n"))
        draw_terminal(text.replace(f"{ROOT}/", "")).savefig(run_dir / "terminal.png")
        for name in ("terminal.png", "curves.png", "mistakes.png"):
            with Image.open(run_dir / name) as picture:
                small = picture.convert("RGB").quantize(32, dither=Image.Dither.NONE)
            small.save(ROOT / "docs" / "pictures" / name, optimize=True)


if __name__ == "__main__":
    main()
