"""A page in the browser, made of gradio's own components, that shows predictions of a model.

Nothing is loaded from another machine. What is sent to the page is kept in a temporary folder that
is removed when the server ends.
"""

import io
import os
import re
import signal
import socket
import tempfile
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from trainkit.errors import UsageError, as_usage_error
from trainkit.plots import figures
from trainkit.tables.columns import Column
from trainkit.text import first_sentence, write_number
from trainkit.tools import answers

MAX_FILE = "32mb"  # of a picture file
MAX_PIXELS = 50_000_000  # of a picture once it is decoded; many phones take 12 or 48 million
MAX_SHOWN = 20  # test pictures, one of each class
# An answer follows each change without a sign that it is computed, and only the last one counts.
QUICK: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last"}
EPOCH = datetime(1970, 1, 1)  # from which the days of dates are counted
NUM_POINTS = 120  # at which a curve is drawn
# Where the name of a column says its unit: weight (kg), weight [kg], weight_kg, price_eur.
UNIT = re.compile(
    r"[(\[]([^()\[\]]+)[)\]]\s*$|_([mck]?m|[mk]?g|lbs?|ml|ms|sec|min|hours|days|years|eur|usd|gbp"
    r"|chf|pct|percent|celsius|mph|kmh|k?wh?)$",
    re.IGNORECASE,
)


def find_shelves(predictor: Any) -> dict[str, list[tuple[int, str]]]:
    """Return evaluated pictures to choose from, number and caption: one per class, mistakes."""
    tensors = predictor.evaluated
    if "prediction" not in tensors:
        return {}
    classes = predictor.metadata["classes"]
    predicted, truth = ([classes[n] for n in tensors[key]] for key in ("prediction", "target"))
    last = {truth[n]: n for n in figures.saved_pictures(tensors)}  # of photos, the smallest loss
    worst = figures.worst_mistakes(tensors)[0].tolist() if last else ()
    first = [(last[name], name) for name in classes if name in last]
    title = "test pictures"
    if len(first) > MAX_SHOWN:
        title += f": of the first {MAX_SHOWN} of {len(first)} classes"
    return {
        title: first[:MAX_SHOWN],
        "worst mistakes": [(n, f"{truth[n]}, taken for {predicted[n]}") for n in worst],
    }


def describe_refusal(problem: UsageError, path: Path | io.BytesIO) -> str:
    """Say why a picture cannot be read, and what helps, without its path on this machine."""
    reason = str(problem).removeprefix(f"{path} cannot be read as a picture: ")
    reason = re.sub(r"^\w+(Error|Exception): ", "", reason.replace(str(path), "the picture"))
    sentence = f"The picture cannot be read: {reason}."
    return sentence + (" Save it as PNG or JPEG." if "it is not one of" in reason else "")


def answer_file(predictor: Any, file: str | io.BytesIO | None) -> tuple:
    """Return what is shown for a picture file: the answer as HTML, the probabilities, two views."""
    if file is None:
        return "", None, None
    path = Path(file) if isinstance(file, str) else file
    try:
        pictures, doubt = predictor.read(path)
    except UsageError as problem:
        return escape(describe_refusal(problem, path)), None, None
    return answers.describe_answer(predictor, pictures[0], doubt)


def is_empty(drawn: dict[str, Any] | None) -> bool:
    """Return whether nothing is drawn on the pad."""
    return drawn is None or drawn["composite"] is None or drawn["composite"].min() == 255


def answer_drawing(predictor: Any, drawn: dict[str, Any] | None) -> tuple:
    """Return what is shown for a drawing on the pad, which is read like a picture file."""
    if drawn is None or is_empty(drawn):
        return "", None, None
    file = io.BytesIO()
    Image.fromarray(drawn["composite"]).save(file, "png")
    return answer_file(predictor, file)


def answer_pad(predictor: Any, drawn: dict[str, Any] | None) -> list:
    """Return what answer_drawing does, and None for the picture file; of an empty pad no change."""
    import gradio

    if is_empty(drawn):
        return [gradio.skip() for _ in range(4)]
    return [*answer_drawing(predictor, drawn), None]


def add_shelf(
    predictor: Any, label: str, shelf: list[tuple[int, str]], shown: list, places: list
) -> None:
    """Add evaluated pictures of which the user can choose one to see its prediction.

    places: of a picture of the user's own, which are emptied then.
    """
    import gradio

    pictures = figures.saved_pictures(predictor.evaluated)
    logits = predictor.evaluated["logits"] / predictor.calibration["temperature"]

    def choose(chosen: gradio.SelectData) -> tuple:
        number, _ = shelf[chosen.index]
        probabilities = logits[number].softmax(0)
        answer = answers.describe_answer(predictor, pictures[number], "", probabilities)
        return *answer, *[None for _ in places]

    named = [(figures.to_array(pictures[number]), caption) for number, caption in shelf]
    gallery = gradio.Gallery(
        named, label=label, format="png", allow_preview=False, elem_classes="shelf"
    )
    gallery.select(choose, None, [*shown, *places], show_progress="hidden")


def add_confusions(predictor: Any) -> None:
    """Add what was taken for what among the evaluated samples, if there are any."""
    import gradio

    if "prediction" in predictor.evaluated:
        with gradio.Accordion("confusions", open=False):
            try:
                figure = figures.draw_confusion(predictor.evaluated, predictor.metadata["classes"])
                figure.draw_without_rendering()  # what cannot be drawn fails here
            except Exception as problem:  # as in training, the rest goes on
                gradio.HTML(f"They cannot be drawn: {escape(first_sentence(problem))}")
            else:
                gradio.Plot(figure, show_label=False)


def build_picture_page(page: Any, predictor: Any) -> None:
    """Build a place for a picture file, a pad to draw on if that fits, and evaluated pictures."""
    import gradio

    script = Path(__file__).with_name("page.js").read_text()
    has_pad = predictor.metadata["input"] == "picture"
    with gradio.Row():
        with gradio.Column(min_width=320):
            if has_pad:
                brush = gradio.Brush(default_size=11, colors=["#000000"], color_mode="fixed")
                pad = gradio.Sketchpad(
                    canvas_size=(280, 280),
                    fixed_canvas=True,
                    height=380,
                    image_mode="L",
                    layers=False,
                    transforms=(),
                    buttons=[],
                    elem_id="pad",
                    label="draw here",
                    brush=brush,
                )
            file = gradio.File(file_types=["image"], elem_id="file", label="a picture file")
        with gradio.Column(min_width=320):
            answer_box = gradio.HTML(elem_classes="said")
            shares = gradio.Label(num_top_classes=10, show_heading=False, label="probabilities")
            why = gradio.Gallery(columns=2, format="png", elem_id="why", label="why")
    shown = [answer_box, shares, why]
    # What answers is what the user did last, and the other places are emptied, which asks nothing.
    file.upload(partial(answer_file, predictor), file, shown, **QUICK)
    file.clear(lambda: ("", None, None), None, shown, **QUICK)
    places: list[Any] = [file]
    if has_pad:
        places.append(pad)
        file.upload(lambda: None, None, pad, **QUICK)
        pad.change(partial(answer_pad, predictor), pad, [*shown, file], **QUICK)
        pad.clear(lambda: ("", None, None), None, shown, js=script)
        page.load(None, js=script)
    for label, shelf in find_shelves(predictor).items():
        if shelf:
            add_shelf(predictor, label, shelf, shown, places)
    add_confusions(predictor)


def find_span(metadata: dict[str, Any], name: str) -> tuple[float, float, float, float | None]:
    """Return a slider's first, last and initial value and its step, from the training rows."""
    number = metadata["features"].index(name)
    mean = metadata["feature_mean"][number]
    start, step = float(f"{mean:.3g}"), None
    if metadata["feature_whole"][number]:
        start, step = round(mean), 1.0
    return *metadata["feature_range"][number], start, step


def to_days(text: str) -> float:
    """Return the days since 1970 of a date, with or without a time. Raises ValueError."""
    written = datetime.fromisoformat(text.strip()).replace(tzinfo=None)
    return (written - EPOCH) / timedelta(days=1)


def to_dates(days: np.ndarray) -> np.ndarray:
    """Return days since 1970 as dates that matplotlib writes as such."""
    return np.array([EPOCH + timedelta(days=float(day)) for day in days])


def answer_row(
    predictor: Any, names: list[str], spans: dict[str, tuple], touched: str, *cells: Any
) -> tuple:
    """Return the targets of a row as HTML, and their curves along the number changed last."""
    metadata = predictor.metadata
    values = dict(zip(names, cells, strict=True))
    dates = {column["name"] for column in metadata["columns"] if column.get("days")}
    for name in dates:
        if isinstance(values[name], str) or values[name] is None:  # as the page has it
            try:
                values[name] = to_days(values[name] or "")
            except ValueError:
                return f"{escape(name)}: write a date such as 2020-01-31", None
    along = touched if touched in spans else next(iter(spans), "")
    points = np.zeros(1)
    if spans:  # the first one is that of the row
        low, high, *_ = spans[along]
        points = np.append(float(values[along]), np.linspace(low, high, NUM_POINTS))
    blocks = [
        column.expand(
            points
            if column.name == along
            else np.full(len(points), values[column.name], dtype=object)
        )
        for column in (Column(**column) for column in metadata["columns"])
    ]
    outputs = predictor(torch.from_numpy(np.concatenate(blocks, axis=1))).numpy()
    if "classes" in metadata:
        html = f"<h2>{escape(predictor.describe(torch.from_numpy(outputs[0])))}</h2>"
        targets = metadata["classes"]
        order = (-outputs[0]).argsort()
    else:
        targets = metadata["targets"]
        order = np.arange(len(targets))
        pairs = zip(targets, outputs[0], strict=True)
        texts = (f"{target}: {with_unit(value, target, 6)}" for target, value in pairs)
        html = "".join(f"<h2>{escape(text)}</h2>" for text in texts)
    if not spans:
        return html, None
    names = [targets[number] for number in order]
    try:
        places = to_dates(points) if along in dates else points
        figure = answers.draw_responses(places, outputs[:, order], along, names)
        figure.draw_without_rendering()
    except Exception as problem:  # the answer is worth more than its curve
        return f"{html}The curve cannot be drawn: {escape(first_sentence(problem))}", None
    return html, figure


def add_date(name: str, span: tuple[float, float, float, float | None]) -> Any:
    """Add a field for a date; with a time if those of the training rows had one."""
    import gradio

    low, high, value, step = span
    has_time = step is None
    form = "%Y-%m-%d %H:%M:%S" if has_time else "%Y-%m-%d"
    first, last, shown = (date.strftime(form) for date in to_dates(np.array([low, high, value])))
    info = f"in training {first} to {last}"
    return gradio.DateTime(shown, include_time=has_time, type="string", label=name, info=info)


def build_table_page(page: Any, predictor: Any) -> None:
    """Build a slider for each column of numbers, and a list for categories."""
    import gradio

    fields: dict[str, Any] = {}
    spans: dict[str, tuple] = {}
    with gradio.Row():
        with gradio.Column(min_width=320):
            for column in predictor.metadata["columns"]:
                name = column["name"]
                if column["categories"] is not None:
                    fields[name] = gradio.Dropdown(column["categories"], label=name)
                    continue
                spans[name] = find_span(predictor.metadata, name)
                if column.get("days"):
                    fields[name] = add_date(name, spans[name])
                else:
                    fields[name] = gradio.Slider(*spans[name], label=name)
        with gradio.Column(min_width=320):
            shown = [gradio.HTML(elem_classes="said"), gradio.Plot(show_label=False)]
    inputs = [*fields.values()]
    for name, field in fields.items():
        answer = partial(answer_row, predictor, [*fields], spans, name)
        field.change(answer, inputs, shown, **QUICK)
    # For the values that the page shows at first.
    page.load(partial(answer_row, predictor, [*fields], spans, ""), inputs, shown)


def with_unit(value: float, name: str, digits: int = 3) -> str:
    """Write a value of a column, with its unit if the name of the column says it."""
    found = UNIT.search(name)
    unit = found[1] or found[2] if found else ""
    return f"{write_number(value, digits)} {unit}".strip()


def describe_quality(predictor: Any) -> str:
    """Say what the model predicts, and how far off it was for the evaluated samples."""
    prediction, target = (predictor.evaluated.get(key) for key in ("prediction", "target"))
    names = predictor.metadata.get("targets", [])
    if prediction is None or target is None:
        return f"It predicts {', '.join(names)}." if names else ""
    seen = f"{len(target):,} samples that it was not trained on"
    if "classes" in predictor.metadata:
        share = (prediction == target).double().mean()
        most = target.bincount().max() / len(target)
        what = f"predicts {names[0]}, and " if names else ""
        return f"It {what}is right for {share:.1%} of {seen}; the largest class has {most:.1%}."
    errors = (prediction - target).abs()
    limits = zip(names, errors.median(0).values, errors.quantile(0.9, 0), strict=True)
    return " ".join(
        f"It predicts {name}, and is usually off by less than {with_unit(half.item(), name)}: for "
        f"half of {seen}, and for nine in ten by less than {with_unit(most.item(), name)}."
        for name, half, most in limits
    )


def answer_text(predictor: Any, text: str) -> tuple:
    """Return what is shown for a text: the answer as HTML, and the probabilities."""
    if not text.strip():
        return "", None
    inputs, doubt = predictor.read(text)
    probabilities = predictor(inputs)[0]
    answer = predictor.describe(probabilities, doubt).split("  (then ")[0]
    shares = dict(zip(predictor.metadata["classes"], probabilities.tolist(), strict=True))
    return f"<h2>{escape(answer)}</h2>", shares


def build_text_page(page: Any, predictor: Any) -> None:
    """Build a place for a text."""
    import gradio

    with gradio.Row():
        with gradio.Column(min_width=320):
            text = gradio.Textbox(lines=8, label="a text", elem_id="text")
        with gradio.Column(min_width=320):
            answer_box = gradio.HTML(elem_classes="said")
            shares = gradio.Label(num_top_classes=10, show_heading=False, label="probabilities")
    text.change(partial(answer_text, predictor), text, [answer_box, shares], **QUICK)
    add_confusions(predictor)


# How each kind of input is shown: the "input" of the metadata, and what builds its page.
BUILDERS: dict[str, Callable] = {
    "picture": build_picture_page,
    "photo": build_picture_page,
    "table": build_table_page,
    "table_class": build_table_page,
    "text": build_text_page,
}


def serve(predictor: Any, run_dir: Path, host: str | None, port: int | None) -> None:
    """Show a page until Ctrl-C or SIGTERM. Raises UsageError.

    predictor: what predict.load_run returns for run_dir. port: None means the first free one from
    7860 on.
    """
    if predictor.metadata["input"] not in BUILDERS:
        raise UsageError(
            f"app.py cannot show a model whose input is a {predictor.metadata['input']}: give its "
            "run folder to predict.py"
        )
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        with as_usage_error("app.py needs `pip install gradio`"):
            import gradio  # here: it takes seconds, and reads the variables above once

        Image.MAX_IMAGE_PIXELS = MAX_PIXELS
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        name = run_dir.resolve().name
        with gradio.Blocks(title=name, analytics_enabled=False) as page:
            gradio.HTML(f"<h1>{escape(name)}</h1>{escape(describe_quality(predictor))}")
            BUILDERS[predictor.metadata["input"]](page, predictor)
        try:
            # Asked once: with an unknown name the page would ask again for each port, for a minute.
            socket.getaddrinfo(host or "localhost", None)
            _, url, _ = page.launch(
                server_name=host,
                server_port=port,
                share=False,
                quiet=True,
                ssr_mode=False,
                prevent_thread_lock=True,
                footer_links=[],
                max_file_size=MAX_FILE,
                css_paths=[Path(__file__).with_name("page.css")],
            )
        except (OSError, OverflowError) as problem:
            address = f"--host {host or 'localhost'} --port {port or 'from 7860 on'}"
            raise UsageError(f"{address}: {problem}") from problem
        print(f"{name}: {url} (Ctrl-C ends it)", flush=True)
        page.block_thread()
