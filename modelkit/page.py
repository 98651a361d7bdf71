"""A Gradio page on this machine alone: no network, nothing that piles up, limits for what is sent.

Import this before gradio, which reads its settings only once.
"""

import base64
import importlib.util
import io
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from trainkit.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

MAX_REQUEST, MAX_KEPT = 8 * 2**20, 200 * 2**20  # bytes of one upload, of all that are kept
MAX_PIXELS = 25_000_000  # of a picture once it is decoded
CSS = """
h2 { margin: 0 0 6px !important } h2 small { font-weight: normal }
.bars { display: grid; grid-template-columns: max-content 1fr 4em; gap: 2px 10px;
  align-items: center; max-height: 24em; overflow: auto; font-variant-numeric: tabular-nums }
.bars span:nth-child(3n) { text-align: right }
.bars progress { appearance: none; width: 100%; height: 14px; border: none; background: #8883 }
.bars progress::-webkit-progress-bar { background: #8883 }
.bars progress::-webkit-progress-value { background: #2f8fd0 }
.bars progress::-moz-progress-bar { background: #2f8fd0 }
.views { display: flex; gap: 12px }
.views figure { margin: 0; flex: 1; max-width: 240px }
.views img { width: 100%; image-rendering: pixelated }
.curve img { width: 100%; max-width: 520px }
.grid-wrap { height: auto !important; min-height: 0 !important; max-height: none !important }
.grid-container { grid-template-columns: repeat(auto-fill, minmax(60px, 1fr)) !important;
  padding-top: 30px }
.grid-container .thumbnail-item { aspect-ratio: auto; height: auto }
.grid-container img { aspect-ratio: 1; height: auto; image-rendering: pixelated }
.grid-container .caption-label { position: static; max-width: none; border: none; padding: 0 4px }
"""
# A Sketchpad has no tool when the page opens nor after Clear, and a stroke then does nothing.
PICK_BRUSH = """() => { const start = Date.now(), go = () => {
  const brush = document.querySelector('#pad button[aria-label="Brush"]'),
        hint = document.querySelector('#pad .empty');
  if (brush && hint) brush.click();
  if ((!brush || hint) && Date.now() - start < 15000) setTimeout(go, 100); }; go(); }"""


class SizeLimit:
    """ASGI middleware: what is sent has an allowed length, and what is kept an allowed sum."""

    def __init__(self, app: Callable, folder: Path):
        self.app, self.folder = app, folder

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD"):
            length = dict(scope["headers"]).get(b"content-length", b"no length")
            kept = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
            allowed = min(MAX_REQUEST, MAX_KEPT - kept)
            if not length.isdigit() or int(length) > allowed:
                await send({"type": "http.response.start", "status": 413, "headers": []})
                await send({"type": "http.response.body", "body": b"too large"})
                return
        await self.app(scope, receive, send)


def serve(build: Callable, title: str, host: str | None, port: int | None) -> None:
    """Show the page that `build(gradio)` fills until Ctrl-C or SIGTERM. port None: the first free.

    What is uploaded lies in a temporary folder, for ten minutes at most. Raises UsageError.
    """
    if importlib.util.find_spec("gradio") is None:
        raise UsageError("app.py needs the package gradio, not installed here: pip install gradio")
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="page-", ignore_cleanup_errors=True) as folder:
        os.environ["GRADIO_TEMP_DIR"] = tempfile.tempdir = folder
        import gradio  # here: it takes seconds
        from starlette.middleware import Middleware

        with gradio.Blocks(title=title, analytics_enabled=False, delete_cache=(60, 600)) as page:
            build(gradio)
        try:
            _, url, _ = page.launch(
                server_name=host, server_port=port, share=False, quiet=True, ssr_mode=False,
                prevent_thread_lock=True, footer_links=[], run_history=False, css=CSS,
                theme=gradio.themes.Base(font="system-ui", font_mono="monospace"),
                app_kwargs={"middleware": [Middleware(SizeLimit, folder=Path(folder))]},
            )  # fmt: skip
        except OSError as problem:
            given = f"--host {host or 'localhost'} --port {port or 'from 7860 on'}"
            raise UsageError(f"{given}: {problem}") from problem
        print(f"{title}: {url} (Ctrl-C ends it)", flush=True)
        page.block_thread()


def bars(names: Sequence[str], shares: Sequence[float]) -> str:
    """HTML: a row for each name, in this order."""
    rows = (
        f'<span>{escape(name)}</span><progress value="{share:.4f}" aria-label="{escape(name)}">'
        f"</progress><span>{share:.1%}</span>"
        for name, share in zip(names, shares, strict=True)
    )
    return f'<div class="bars">{"".join(rows)}</div>'


def views(pictures: dict[str, np.ndarray]) -> str:
    """HTML: small pictures side by side over their captions, uint8, grey or RGB."""
    figures = []
    for caption, values in pictures.items():
        file = io.BytesIO()
        Image.fromarray(values).save(file, "png")
        figures.append(f"<figure>{_inside(file.getvalue(), 'png', caption)}"
                       f"<figcaption>{escape(caption)}</figcaption></figure>")  # fmt: skip
    return f'<div class="views">{"".join(figures)}</div>'


def drawing(figure: "Figure", what: str) -> str:
    """HTML: a matplotlib figure in colours that a light and a dark page allow."""
    for axes in figure.axes:
        axes.grid(color="0.5", alpha=0.3)
        axes.tick_params(colors="0.5")
        for part in (axes.xaxis.label, axes.yaxis.label, *axes.spines.values()):
            part.set(color="0.5")
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True)
    return f'<div class="curve">{_inside(file.getvalue(), "svg+xml", what)}</div>'


def _inside(content: bytes, kind: str, what: str) -> str:
    """A picture in the page itself, for which no file is written."""
    data = base64.b64encode(content).decode()
    return f'<img alt="{escape(what)}" src="data:image/{kind};base64,{data}">'
