"""Draw the README's pictures: the default run's terminal output, its curves, mistakes and page.

    python -m benchmarks.pictures

The output comes from a real terminal of 80 columns (util-linux's `script`). The path of this
repository is removed from it, and so is what disappears: the progress bar, when an epoch ends. The
page is that of Chromium (playwright). What terminal.png and app.png say is written beside them, and
tests compare these texts with those of a run.
"""

import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks._runs import MNIST, ROOT

COLUMNS, DPI = 80, 100


def draw_terminal(text: str) -> Figure:
    """Draw dark monospaced text on a light background."""
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, COLUMNS)]
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


def draw_seven(tab: Any) -> None:
    """Draw a seven on the page in a tab of playwright, and wait for the answer."""
    tab.wait_for_selector('#pad button[aria-label="Brush"]')
    tab.wait_for_selector("#pad .empty", state="detached")
    tab.wait_for_timeout(300)
    box = tab.locator("#pad canvas").first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for number, (right, down) in enumerate([(-60, -80), (50, -80), (-20, 80)]):
        tab.mouse.move(x + right, y + down, steps=8)
        if not number:
            tab.mouse.down()
    tab.mouse.up()
    tab.wait_for_function("document.querySelector('.said h2')")


def draw_page(run_dir: Path, path: Path) -> str:
    """Write a picture of the page of a run, with a seven drawn on it; return the page's text."""
    from playwright.sync_api import sync_playwright  # here: a test without it imports this file

    command = [sys.executable, ROOT / "app.py", run_dir]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            with sync_playwright() as started:
                chromium = started.chromium.launch(executable_path=shutil.which("chromium"))
                tab = chromium.new_page(viewport={"width": 1280, "height": 800})
                tab.goto(server.stdout.readline().split()[1])
                draw_seven(tab)
                tab.wait_for_timeout(2000)  # for the bars to have moved
                tab.screenshot(path=path, full_page=True)
                return tab.locator("body").inner_text()
        finally:
            server.terminate()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory, "runs", "mnist")
        shell = f"stty cols {COLUMNS}; {sys.executable} {MNIST}"
        command = ["script", "-qec", shell, "/dev/null"]
        shown = subprocess.run(command, cwd=directory, capture_output=True, check=True)
        lines = shown.stdout.decode().replace("\r\n", "\n").split("\n")
        text = "\n".join(line.rpartition("\r")[2].rstrip() for line in lines)
        text = f"$ python train_mnist.py\n{text}".replace(f"{ROOT}/", "")
        draw_terminal(text).savefig(run_dir / "terminal.png")
        texts = {"terminal": text, "app": draw_page(run_dir, run_dir / "app.png")}
        for name in ("terminal", "app", "curves", "mistakes"):
            said, path = PngInfo(), ROOT / "docs" / "pictures" / f"{name}.png"
            if name in texts:
                path.with_suffix(".txt").write_text(texts[name], "utf-8")
                said.add_itxt("Description", texts[name])
            with Image.open(run_dir / path.name) as picture:
                small = picture.convert("RGB").quantize(
                    128 if name == "app" else 32, dither=Image.Dither.NONE
                )
            small.save(path, optimize=True, pnginfo=said)


if __name__ == "__main__":
    main()
