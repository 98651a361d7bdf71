"""A page in the browser, made of gradio's own components, that shows predictions of a model.

Nothing is loaded from another machine. What is sent to the page is kept in a temporary folder that
is removed when the server ends.
"""

import io
import math
import os
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

from trainkit.errors import UsageError, as_usage_error
from trainkit.plots import figures
from trainkit.tables.columns import MISSING, Column, encode
from trainkit.text import write_number
from trainkit.tools import answers

MAX_FILE = "32mb"  # of a picture file
MAX_PIXELS = 50_000_000  # of a picture once it is decoded; many phones take 12 or 48 million
MAX_SHOWN = 20  # test pictures, one of each class
# An answer follows each change without a sign that it is computed, and only the last one counts.
QUICK: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last"}
NUM_POINTS = 120  # at which a curve is drawn
WHAT_TO_DO = {
    "picture": "Draw below, or choose a picture, and its answer stands here.",
    "photo": "Choose a picture below, and its answer stands here.",
    "text": "Write or paste a text below, and its answer stands here.",
}


def one_of_each(predictor: Any) -> list[tuple[int, str]]:
    """Return the number of an evaluated picture of each class, with the name of the class."""
    tensors, classes = predictor.evaluated, predictor.metadata["classes"]
    # Of photos, the last one saved has the smallest loss.
    last = {int(tensors["target"][n]): n for n in figures.saved_pictures(tensors)}
    return [(last[n], name) for n, name in enumerate(classes) if n in last][:MAX_SHOWN]


def answer_file(predictor: Any, file: str | io.BytesIO | None) -> tuple:
    """Return what is shown for a picture file: answer and probabilities as HTML, two views."""
    if file is None:
        return WHAT_TO_DO[predictor.metadata["input"]], "", None
    try:
        pictures, doubt = predictor.read(Path(file) if isinstance(file, str) else file)
    except UsageError as problem:
        return escape(str(problem).replace(str(file), "the file")), "", None
    return answers.describe_answer(predictor, pictures[0], doubt)


def answer_pad(predictor: Any, drawn: dict[str, Any] | None) -> list:
    """Return what answer_file does of a drawing, and None for the picture file.

    Of an empty pad it changes nothing.
    """
    import gradio

    if drawn is None or drawn["composite"] is None or drawn["composite"].min() == 255:
        return [gradio.skip() for _ in range(4)]
    file = io.BytesIO()
    Image.fromarray(drawn["composite"]).save(file, "png")
    return [*answer_file(predictor, file), None]


def answer_evaluated(predictor: Any, number: int) -> tuple:
    """Return what answer_file does of an evaluated picture."""
    logits = predictor.evaluated["logits"][number] / predictor.calibration["temperature"]
    picture = figures.saved_pictures(predictor.evaluated)[number]
    return answers.describe_answer(predictor, picture, "", logits.softmax(0))


def add_shelf(predictor: Any, shelf: list[tuple[int, str]], shown: list, places: list) -> None:
    """Add evaluated pictures of which the user can choose one to see its prediction.

    shelf: what one_of_each returns. places: of a picture of the user's own, which are emptied then.
    """
    import gradio

    def choose(chosen: gradio.SelectData) -> tuple:
        number, _ = shelf[chosen.index]
        return *answer_evaluated(predictor, number), *[None for _ in places]

    pictures = figures.saved_pictures(predictor.evaluated)
    named = [(figures.to_array(pictures[number]), caption) for number, caption in shelf]
    gallery = gradio.Gallery(
        named, label="test pictures", format="png", allow_preview=False, elem_classes="shelf"
    )
    gallery.select(choose, None, [*shown, *places], show_progress="hidden")


def build_picture_page(page: Any, predictor: Any) -> None:
    """Build a place for a picture file, a pad to draw on if that fits, and evaluated pictures."""
    import gradio

    script = Path(__file__).with_name("page.js").read_text()
    has_pad = predictor.metadata["input"] == "picture"
    shelf = one_of_each(predictor)
    empty = answer_file(predictor, None)
    # It begins with a test picture, which shows what an answer looks like.
    begin = answer_evaluated(predictor, shelf[0][0]) if shelf else empty
    said = f"{begin[0]}. This is a test picture. {empty[0]}" if shelf else empty[0]
    answer_box = gradio.HTML(said, elem_classes="said")
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
            with gradio.Accordion(
                "or choose a picture file" if has_pad else "a picture file",
                open=not has_pad,
                elem_id="upload",
            ):
                file = gradio.File(file_types=["image"], elem_id="file", show_label=False)
        with gradio.Column(min_width=320):
            shares = gradio.HTML(begin[1])
            why = gradio.Gallery(begin[2], columns=2, format="png", elem_id="why", show_label=False)
    shown = [answer_box, shares, why]
    # What answers is what the user did last, and the other places are emptied, which asks nothing.
    file.upload(partial(answer_file, predictor), file, shown, **QUICK)
    file.clear(lambda: empty, None, shown, **QUICK)
    places: list[Any] = [file]
    if has_pad:
        places.append(pad)
        file.upload(lambda: None, None, pad, **QUICK)
        pad.change(partial(answer_pad, predictor), pad, [*shown, file], **QUICK)
        pad.clear(lambda: empty, None, shown, js=script)
    page.load(None, js=script)
    if shelf:
        add_shelf(predictor, shelf, shown, places)


def answer_row(predictor: Any, touched: str, *cells: Any) -> tuple:
    """Return the targets of a row as HTML, and their curves along the number changed last.

    cells: a value for each column of the metadata; a date is a text such as 2020-01-31.
    """
    metadata = predictor.metadata
    columns = [Column(**column) for column in metadata["columns"]]
    numbers = [column.name for column in columns if column.categories is None and not column.days]
    along = touched if touched in numbers else next(iter(numbers), "")
    row = {column.name: [cell] for column, cell in zip(columns, cells, strict=True)}
    if along:  # the first one is that of the row
        low, high = metadata["feature_range"][metadata["features"].index(along)]
        row[along] += np.linspace(low, high, NUM_POINTS).tolist()
    num_rows = max(map(len, row.values()))
    table = pd.DataFrame({name: num_rows * v if len(v) == 1 else v for name, v in row.items()})
    inputs, problems = encode(table, columns)
    if problems:
        _, name, problem = problems[0]
        return escape(f"{name}: {problem}"), None
    outputs = predictor(torch.from_numpy(inputs)).numpy()
    targets, order = metadata["targets"], np.arange(outputs.shape[1])
    if "classes" in metadata:
        said = [predictor.describe(torch.from_numpy(outputs[0]))]
        targets, order = metadata["classes"], (-outputs[0]).argsort()
    else:
        each = zip(targets, outputs[0].tolist(), usual_errors(predictor), strict=True)
        said = [f"{in_words(name)}: {write_known(value, off)}" for name, value, off in each]
    html = "".join(f"<h2>{escape(text)}</h2>" for text in said)
    if not along:
        return html, None
    names = [targets[number] for number in order]
    points = np.array(row[along], dtype=np.float64)
    names = [*map(in_words, names)]
    return html, answers.draw_responses(points, outputs[:, order], in_words(along), names)


def in_words(name: str) -> str:
    """Return the name of a column as it is shown."""
    return name.replace("_", " ").strip() or name


def first_row(predictor: Any) -> dict[str, Any]:
    """Return cells to begin with: of an evaluated row that lacks none, or else the usual ones."""
    metadata = predictor.metadata
    low, high = np.array(metadata["feature_range"]).T
    rows = predictor.evaluated.get("feature", torch.zeros(0, len(low))).numpy()
    is_inside = (np.abs(rows - rows.clip(low, high)) <= 1e-5 * (high - low)).all(1)
    for numbers in [*rows[is_inside], np.array(metadata["feature_mean"])]:
        cells, filled, start = {}, False, 0
        for column in (Column(**column) for column in metadata["columns"]):
            number, end = numbers[start], start + len(column.feature_names())
            if column.categories is not None:
                each = numbers[start:end]
                cell = column.categories[each.argmax()] if each.any() else None
            elif column.days:
                cell = str(np.datetime64(round(number), "D"))
            else:  # the saved numbers have been in float32
                cell = float(np.clip(float(f"{number:.6g}"), low[start], high[start]))
                cell = round(number) if metadata["feature_whole"][start] else cell
            is_mean = column.fill is not None and np.isclose(number, column.fill)
            filled = filled or is_mean or cell in (None, *MISSING)
            cells[column.name], start = cell, end
        if not filled:
            break
    return cells


def add_field(metadata: dict[str, Any], column: dict[str, Any], start: Any) -> Any:
    """Add a list of categories, a slider over the numbers of the training rows, or a date."""
    import gradio

    name, label = column["name"], in_words(column["name"])
    if column["categories"] is not None:
        return gradio.Dropdown(column["categories"], value=start, label=label)
    number = metadata["features"].index(name)
    low, high = metadata["feature_range"][number]
    if column.get("days"):
        first, last = (str(np.datetime64(round(day), "D")) for day in (low, high))
        return gradio.Textbox(start, label=label, info=f"in training {first} to {last}")
    step = 1.0 if metadata["feature_whole"][number] else None
    return gradio.Slider(low, high, start, step=step, label=label)


def build_table_page(page: Any, predictor: Any) -> None:
    """Build a field for each column."""
    import gradio

    metadata, start = predictor.metadata, first_row(predictor)
    answer_box = gradio.HTML(answer_row(predictor, "", *start.values())[0], elem_classes="said")
    with gradio.Row():
        with gradio.Column(min_width=320):
            pairs = zip(metadata["columns"], start.items(), strict=True)
            fields = {name: add_field(metadata, column, cell) for column, (name, cell) in pairs}
        with gradio.Column(min_width=320):
            shown = [answer_box, gradio.Plot(show_label=False)]
    inputs = [*fields.values()]
    for name, field in fields.items():
        field.change(partial(answer_row, predictor, name), inputs, shown, **QUICK)
    # For the values that the page shows at first.
    page.load(partial(answer_row, predictor, ""), inputs, shown)


def usual_errors(predictor: Any) -> list[float]:
    """Return for each target by how much half of the evaluated samples are off; 0: not known."""
    prediction, target = (predictor.evaluated.get(key) for key in ("prediction", "target"))
    if prediction is None or target is None:
        return [0.0] * len(predictor.metadata["targets"])
    return (prediction - target).abs().median(0).values.tolist()


def write_known(value: float, off: float) -> str:
    """Write a number to two digits of its usual error: about 3,650 of 3,648.46 if off by 189."""
    if not off or not np.isfinite([value, off]).all():
        return write_number(value, 6)
    known = round(float(write_number(value, 6, "")), 1 - math.floor(math.log10(off)))
    return f"about {write_number(known, 15)}" if known else "about 0"


def describe_quality(predictor: Any) -> str:
    """Say what the model predicts, and how far off it was for the evaluated samples."""
    prediction, target = (predictor.evaluated.get(key) for key in ("prediction", "target"))
    names = predictor.metadata.get("targets", [])
    if prediction is None or target is None:
        return f"It predicts {', '.join(map(in_words, names))}." if names else ""
    seen = f"{len(target):,} samples that it was not trained on"
    if "classes" in predictor.metadata:
        share = (prediction == target).double().mean()
        most = target.bincount().max() / len(target)
        what = f"predicts {in_words(names[0])}, and " if names else ""
        return f"It {what}is right for {share:.1%} of {seen}; the largest class has {most:.1%}."
    return " ".join(
        f"It predicts {in_words(name)}, and is off by less than {write_number(half, 3)} for half "
        f"of {seen}."
        for name, half in zip(names, usual_errors(predictor), strict=True)
    )


def answer_text(predictor: Any, text: str) -> tuple:
    """Return what is shown for a text: the answer and the probabilities, as HTML."""
    if not text.strip():
        return WHAT_TO_DO["text"], ""
    inputs, doubt = predictor.read(text)
    probabilities = predictor(inputs)[0]
    answer = predictor.describe(probabilities, doubt).split("  (then ")[0]
    shares = dict(zip(predictor.metadata["classes"], probabilities.tolist(), strict=True))
    return f"<h2>{escape(answer)}</h2>", answers.draw_shares(shares)


def build_text_page(page: Any, predictor: Any) -> None:
    """Build a place for a text."""
    import gradio

    answer_box = gradio.HTML(WHAT_TO_DO["text"], elem_classes="said")
    with gradio.Row():
        with gradio.Column(min_width=320):
            text = gradio.Textbox(lines=8, label="a text", elem_id="text")
        with gradio.Column(min_width=320):
            shares = gradio.HTML()
    text.change(partial(answer_text, predictor), text, [answer_box, shares], **QUICK)


# How each kind of input is shown: the "input" of the metadata, and what builds its page.
BUILDERS: dict[str, Callable] = {
    "picture": build_picture_page,
    "photo": build_picture_page,
    "table": build_table_page,
    "table_class": build_table_page,
    "text": build_text_page,
}


def build(predictor: Any, name: str) -> Any:
    """Return the page of a predictor, a gradio.Blocks with this title."""
    import gradio

    with gradio.Blocks(title=name, analytics_enabled=False) as page:
        gradio.HTML(f"<h1>{escape(name)}</h1>{escape(describe_quality(predictor))}")
        BUILDERS[predictor.metadata["input"]](page, predictor)
    return page


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
            import gradio  # noqa: F401  here: it takes seconds, and reads the variables above once

        Image.MAX_IMAGE_PIXELS = MAX_PIXELS
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        name = run_dir.resolve().name
        page = build(predictor, name)
        with as_usage_error(f"--host {host or 'localhost'} --port {port or 'from 7860 on'}"):
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
        print(f"{name}: {url} (Ctrl-C ends it)", flush=True)
        page.block_thread()
