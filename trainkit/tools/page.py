"""A page in the browser, made of gradio's own components, that shows predictions of a model.

Nothing is loaded from another machine. What is sent to the page is kept in a temporary folder that
is removed when the server ends.
"""

import io
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
from trainkit.tables.columns import Column, encode
from trainkit.text import write_number
from trainkit.tools import answers

MAX_FILE = "32mb"  # of a picture file
MAX_PIXELS = 50_000_000  # of a picture once it is decoded; many phones take 12 or 48 million
MAX_SHOWN = 20  # test pictures, one of each class
# An answer follows each change without a sign that it is computed, and only the last one counts.
QUICK: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last"}
NUM_POINTS = 120  # at which a curve is drawn


def one_of_each(predictor: Any) -> list[tuple[int, str]]:
    """Return the number of an evaluated picture of each class, with the name of the class."""
    tensors, classes = predictor.evaluated, predictor.metadata["classes"]
    # Of photos, the last one saved has the smallest loss.
    last = {int(tensors["target"][n]): n for n in figures.saved_pictures(tensors)}
    return [(last[n], name) for n, name in enumerate(classes) if n in last][:MAX_SHOWN]


def answer_file(predictor: Any, file: str | io.BytesIO | None) -> tuple:
    """Return what is shown for a picture file: the answer as HTML, the probabilities, two views."""
    if file is None:
        return "", None, None
    try:
        pictures, doubt = predictor.read(Path(file) if isinstance(file, str) else file)
    except UsageError as problem:
        return escape(str(problem).replace(str(file), "the file")), None, None
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


def add_shelf(predictor: Any, shown: list, places: list) -> None:
    """Add evaluated pictures of which the user can choose one to see its prediction.

    places: of a picture of the user's own, which are emptied then.
    """
    import gradio

    pictures = figures.saved_pictures(predictor.evaluated)
    shelf = one_of_each(predictor)

    def choose(chosen: gradio.SelectData) -> tuple:
        number, _ = shelf[chosen.index]
        logits = predictor.evaluated["logits"][number] / predictor.calibration["temperature"]
        answer = answers.describe_answer(predictor, pictures[number], "", logits.softmax(0))
        return *answer, *[None for _ in places]

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
    if figures.saved_pictures(predictor.evaluated):
        add_shelf(predictor, shown, places)


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
        pairs = zip(targets, outputs[0], strict=True)
        said = [f"{target}: {write_number(value, 6)}" for target, value in pairs]
    html = "".join(f"<h2>{escape(text)}</h2>" for text in said)
    if not along:
        return html, None
    names = [targets[number] for number in order]
    points = np.array(row[along], dtype=np.float64)
    return html, answers.draw_responses(points, outputs[:, order], along, names)


def add_field(metadata: dict[str, Any], column: dict[str, Any]) -> Any:
    """Add a list of categories, a slider over the numbers of the training rows, or a date."""
    import gradio

    name = column["name"]
    if column["categories"] is not None:
        return gradio.Dropdown(column["categories"], label=name)
    number = metadata["features"].index(name)
    low, high = metadata["feature_range"][number]
    mean, is_whole = metadata["feature_mean"][number], metadata["feature_whole"][number]
    if column.get("days"):
        first, last, start = (str(np.datetime64(round(day), "D")) for day in (low, high, mean))
        return gradio.Textbox(start, label=name, info=f"in training {first} to {last}")
    shown = round(mean) if is_whole else float(f"{mean:.3g}")
    return gradio.Slider(low, high, shown, step=1.0 if is_whole else None, label=name)


def build_table_page(page: Any, predictor: Any) -> None:
    """Build a field for each column."""
    import gradio

    metadata = predictor.metadata
    with gradio.Row():
        with gradio.Column(min_width=320):
            fields = {each["name"]: add_field(metadata, each) for each in metadata["columns"]}
        with gradio.Column(min_width=320):
            shown = [gradio.HTML(elem_classes="said"), gradio.Plot(show_label=False)]
    inputs = [*fields.values()]
    for name, field in fields.items():
        field.change(partial(answer_row, predictor, name), inputs, shown, **QUICK)
    # For the values that the page shows at first.
    page.load(partial(answer_row, predictor, ""), inputs, shown)


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
    halves = (prediction - target).abs().median(0).values.tolist()
    return " ".join(
        f"It predicts {name}, and is off by less than {write_number(half, 3)} for half of {seen}."
        for name, half in zip(names, halves, strict=True)
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
