"""The page: its looks, what happens in the browser, and a Gradio server that shows it.

Nothing comes from another machine and nothing that is sent is kept. Import this before gradio,
which reads its settings only once.
"""

import base64
import importlib.util
import io
import os
import signal
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

import torch
from PIL import Image

from trainkit.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

MAX_REQUEST = 16 * 2**20  # bytes; a picture takes a third more than its file
MAX_PIXELS = 25_000_000  # of a picture once it is decoded
MAX_BARS = 10
CSS = """
.dark { color-scheme: dark }
.page { font-family: system-ui, sans-serif; display: grid; grid-template-columns: 282px 1fr;
  gap: 12px 32px; align-items: start }
.page h1 { font-size: 22px; margin: 0 0 4px !important }
.page h2 { font-size: 22px; margin: 0 !important }
.page p, .page img { margin: 0 !important }
.page header, .page fieldset { grid-column: 1 / -1 }
.page :focus-visible { outline: 3px solid #2f8fd0 !important; outline-offset: 1px }
.page button, .page select, .page input[type=number] { border: 1px solid #8888; font: inherit;
  color: inherit; padding: 1px 8px; border-radius: 4px; background: #8882; max-width: 100% }
.page select { appearance: auto }
.page select option { background: Canvas; color: CanvasText }
#form label { display: grid; grid-template-columns: minmax(0, 1fr) 9em; margin-bottom: 8px;
  overflow-wrap: anywhere; align-items: end }
#form input[type=range], #form select { grid-column: 1 / -1; width: 100% }
#form input[type=number] { text-align: right }
#pad { background: white; border: 1px solid #888; touch-action: none; cursor: crosshair;
  display: block; margin-bottom: 6px }
#pad ~ * { vertical-align: middle; margin-right: 8px }
#brush { width: 120px; vertical-align: middle }
#file { width: 282px }
#said { display: flex; flex-wrap: wrap; gap: 2px 12px; align-items: baseline; min-height: 36px }
#details { display: flex; flex-wrap: wrap; gap: 12px 32px }
#answer { grid-column: 2; grid-row: 2 / span 2; min-width: 0 }
#answer[aria-busy=true] > * { visibility: hidden }
.bars { flex: 1 0 240px; display: grid; grid-template-columns: fit-content(50%) 1fr 6em;
  gap: 2px 10px; align-items: center; align-self: start; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; line-height: 1.3 }
.bars span:nth-child(3n) { text-align: right }
.bars progress { appearance: none; width: 100%; height: 14px; border: none; background: #8883 }
.bars progress::-webkit-progress-bar { background: #8883 }
.bars progress::-webkit-progress-value { background: #2f8fd0 }
.bars progress::-moz-progress-bar { background: #2f8fd0 }
.bars > :nth-child(-n + 3) { font-weight: bold }
.views { display: flex; gap: 12px; flex: 1 0 280px }
.views figure { margin: 0; flex: 1; max-width: 200px }
.views img { width: 100%; image-rendering: pixelated; border-radius: 0 }
.curve img { width: 100%; max-width: 560px }
.dark .curve img { filter: invert(1) hue-rotate(180deg) }
.shelf { border: 0; padding: 0; display: flex; flex-wrap: wrap; gap: 6px }
.shelf label { position: relative; text-align: center; font-size: 12px; max-width: 96px;
  overflow-wrap: anywhere }
.shelf input { position: absolute; opacity: 0 }
.shelf img { width: 56px; height: 56px; image-rendering: pixelated; border-radius: 0;
  display: block; margin: auto !important; border: 3px solid transparent }
.shelf input:checked + img { border-color: #d55e00 }
.shelf input:focus-visible + img { outline: 3px solid #2f8fd0 }
@media (max-width: 700px) {
  .page { grid-template-columns: minmax(0, 1fr) }
  #answer { grid-area: auto }
  .page h1, .page h2 { font-size: 18px }
}
"""
# One input is answered at a time: the others are emptied, and an answer that another question has
# overtaken is not shown. The strokes are sent as a picture file, as a chosen one is.
SCRIPT = """
const $ = name => element.querySelector('#' + name);
const pad = $('pad'), pen = pad?.getContext('2d'), file = $('file'), form = $('form');
const start = $('said').innerHTML;
let latest = 0, queue = Promise.resolve(), empty = true, drawing = false;

function show(said, details) {
  $('said').innerHTML = said;
  $('details').innerHTML = details;
  $('answer').setAttribute('aria-busy', false);
}
function wait() {
  $('answer').setAttribute('aria-busy', true);
  return ++latest;
}
function ask(name, input) {
  const number = wait();
  queue = queue.then(async () => {
    if (number !== latest) return;
    const lost = '<p>There is no answer: has app.py ended, or has the file more than 11 MB?</p>';
    const [said, details] = await server.answer(input).catch(() => [lost, '']);
    if (number !== latest) return;
    show(said, details);
    $('said').prepend(name);
  });
}
function read(name, blob) {
  wait();
  const reader = new FileReader();
  reader.onload = () => ask(name, ['file', reader.result]);
  reader.readAsDataURL(blob);
}
function reset(kept) {
  element.querySelectorAll('input:checked').forEach(e => { if (e !== kept) e.checked = false; });
  if (kept !== file) file.value = '';
  if (kept === pad) return;
  empty = true;
  Object.assign(pen, {fillStyle: 'white', textAlign: 'center', font: '20px system-ui'});
  pen.fillRect(0, 0, 280, 280);
  pen.fillStyle = '#767676';
  pen.fillText('draw here', 140, 146);
}
if (form) {
  let touched = '';
  const all = () => ask('', [touched, ...new FormData(form).values()]);
  form.onsubmit = event => event.preventDefault();
  form.oninput = ({target}) => {
    const number = target.closest('label').querySelector('[type=number]');
    if (number) touched = number.name;
    if (target.value) target.closest('label').querySelectorAll('input').forEach(
      other => { if (other !== target) other.value = target.value; });
    all();
  };
  all();
} else {
  pad.onpointerdown = event => {
    wait();  // before the stroke ends: the old answer is not this drawing's
    reset(pad);
    if (empty) { pen.fillStyle = 'white'; pen.fillRect(0, 0, 280, 280); }
    empty = false;
    drawing = true;
    pad.setPointerCapture(event.pointerId);
    Object.assign(pen, {lineWidth: $('brush').value, lineCap: 'round', lineJoin: 'round'});
    pen.beginPath();
    pen.moveTo(event.offsetX, event.offsetY);
    pad.onpointermove(event);
  };
  pad.onpointermove = event => {
    if (!drawing) return;
    pen.lineTo(event.offsetX, event.offsetY);
    pen.stroke();
  };
  pad.onpointerup = pad.onpointercancel = () => {
    if (drawing) pad.toBlob(blob => read('your drawing', blob));
    drawing = false;
  };
  $('clear').onclick = () => { wait(); reset(); show(start, ''); };
  file.onchange = () => {
    if (!file.files.length) return;
    reset(file);
    read(file.files[0].name, file.files[0]);
  };
  element.querySelectorAll('.shelf input').forEach(input => input.onclick = () => {
    reset(input);
    ask(input.name + ': ' + input.parentNode.textContent, [input.name, +input.value]);
  });
  reset();
}
"""


class SizeLimit:
    """ASGI middleware: what is sent has an allowed length, and nothing is put on the disk."""

    def __init__(self, app: Callable):
        self.app = app

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD"):
            length = float(dict(scope["headers"]).get(b"content-length", "inf"))
            if length > MAX_REQUEST or scope["path"].rstrip("/").endswith("/upload"):
                from starlette.responses import PlainTextResponse

                await PlainTextResponse("too large", 413)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def serve(html: str, answer: Callable, title: str, host: str | None, port: int | None) -> None:
    """Show a page until Ctrl-C or SIGTERM. port None: the first free one from 7860 on. UsageError.

    answer: takes what SCRIPT asks, returns HTML in two parts: the answer, and what goes with it.
    """
    if importlib.util.find_spec("gradio") is None:
        raise UsageError("app.py needs the package gradio, not installed here: pip install gradio")
    import gradio  # here: it takes seconds
    from starlette.middleware import Middleware

    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with gradio.Blocks(title=title, analytics_enabled=False) as page:
        gradio.HTML(html, js_on_load=SCRIPT, server_functions=[answer])
    try:
        _, url, _ = page.launch(
            server_name=host,
            server_port=port,
            share=False,
            quiet=True,
            ssr_mode=False,
            prevent_thread_lock=True,
            footer_links=[],
            run_history=False,
            css=CSS,
            app_kwargs={"middleware": [Middleware(SizeLimit)]},
        )
    except OSError as problem:
        given = f"--host {host or 'localhost'} --port {port or 'from 7860 on'}"
        raise UsageError(f"{given}: {problem}") from problem
    print(f"{title}: {url} (Ctrl-C ends it)", flush=True)
    page.block_thread()


def percent(share: float) -> str:
    """HTML: a share with two places; 99.997 % is not 100 %."""
    return "&gt; 99.99 %" if 0.9999 < share < 1 else f"{100 * share:.2f} %"


def bars(names: Sequence[str], shares: Sequence[float]) -> str:
    """HTML: a row for each of the MAX_BARS largest shares, the largest first; CSS marks it."""
    rows = (
        f'<span>{escape(name)}</span><progress value="{share:.4f}" aria-label="{escape(name)}">'
        f"</progress><span>{percent(share)}</span>"
        for share, name in sorted(zip(shares, names, strict=True), reverse=True)[:MAX_BARS]
    )
    return f'<div class="bars">{"".join(rows)}</div>'


def shelf(kind: str, pictures: torch.Tensor, captions: Sequence[str]) -> str:
    """HTML: pictures to choose one of; a single stop of the Tab key, as radio buttons are."""
    choices = "".join(
        f'<label><input type="radio" name="{kind}" value="{number}">{picture(values)}'
        f"{escape(caption)}</label>"
        for number, (values, caption) in enumerate(zip(pictures, captions, strict=True))
    )
    return f'<fieldset class="shelf"><legend>{kind.capitalize()}s</legend>{choices}</fieldset>'


def drawing(figure: "Figure", what: str) -> str:
    """HTML: a matplotlib figure without its white ground; CSS inverts it on a dark page."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True)
    return f'<div class="curve">{_inside(file.getvalue(), "svg+xml", what)}</div>'


def picture(values: torch.Tensor) -> str:
    """HTML: a picture, uint8, grey or RGB, beside which there is a text that says what it is."""
    file = io.BytesIO()
    Image.fromarray(values.numpy()).save(file, "png")
    return _inside(file.getvalue(), "png", "")


def _inside(content: bytes, kind: str, what: str) -> str:
    """A picture in the page itself, for which no file is written."""
    data = base64.b64encode(content).decode()
    return f'<img alt="{escape(what)}" src="data:image/{kind};base64,{data}">'
