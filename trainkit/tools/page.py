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
from decimal import Decimal
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from PIL import Image

from trainkit.errors import UsageError, as_usage_error
from trainkit.pictures import border_of
from trainkit.plots import figures
from trainkit.tables.columns import MISSING, Column, encode

MAX_FILE = "32mb"  # of a picture file
MAX_PIXELS = 50_000_000  # of a picture once it is decoded; many phones take 12 or 48 million
MAX_SHARES = 10  # classes with a bar
FOR, AGAINST = torch.tensor([[213.0, 94, 0], [0, 114, 178]])  # orange, blue of style.COLOURS
# An answer follows each change without a sign that it is computed, and only the last one counts.
QUICK: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last"}
WHAT_TO_DO = {
    "picture": "Draw below, or choose a picture, and its answer stands here.",
    "photo": "Choose a picture below, and its answer stands here.",
    "text": "Write or paste a text below, and its answer stands here.",
}


def answer_of_classes(
    predictor: Any, probabilities: torch.Tensor, doubt: str = ""
) -> tuple[str, str]:
    """Return the answer, and the largest probabilities in its digits, beside bars, as HTML."""
    answer = predictor.describe(probabilities, doubt).split("  (then ")[0]
    bars = ""
    for number in probabilities.argsort(descending=True)[:MAX_SHARES].tolist():
        name, share = escape(predictor.metadata["classes"][number]), probabilities[number].item()
        bars += f"<span>{name}</span><meter value={share:.6f}></meter><span>{share:.2%}</span>"
    return f"<h2>{escape(answer)}</h2>", f'<div class="shares">{bars}</div>'


def answer_picture(predictor: Any, file: str | io.BytesIO | None) -> tuple:
    """Return what is shown for a picture file: answer, probabilities, and two views."""
    if file is None:
        return WHAT_TO_DO[predictor.metadata["input"]], "", None
    try:
        pictures, doubt = predictor.read(Path(file) if isinstance(file, str) else file)
    except UsageError as problem:
        return escape(str(problem).replace(str(file), "the file")), "", None
    probabilities = predictor(pictures)[0]
    number = int(probabilities.argmax())
    speaks = occlusion_map(predictor, pictures[0], number)[..., None]
    ink = pictures[0].float().mean(0)[..., None] * 0.7 * (1 - speaks.abs())
    overlay = ink + speaks.clamp(min=0) * FOR - speaks.clamp(max=0) * AGAINST
    answer = predictor.metadata["classes"][number]
    views = [
        (figures.to_array(pictures[0]), "what the network sees"),
        (overlay.byte().numpy(), f"orange speaks for {answer}, blue against"),
    ]
    return *answer_of_classes(predictor, probabilities, doubt), views


def answer_pad(predictor: Any, drawn: dict[str, Any] | None) -> tuple:
    """Return what answer_picture does of a drawing."""
    if drawn is None or drawn["composite"] is None or drawn["composite"].min() == 255:
        return answer_picture(predictor, None)
    file = io.BytesIO()
    Image.fromarray(drawn["composite"]).save(file, "png")
    return answer_picture(predictor, file)


def occlusion_map(predictor: Any, picture: torch.Tensor, answer: int) -> torch.Tensor:
    """Return how much each place of a picture supports the answer, (size, size), from -1 to 1.

    This is how much the log of the answer's probability falls if a square there gets the colour of
    the picture's border, divided by the largest change. picture: uint8 (channels, size, size).
    """
    size = picture.shape[-1]
    step = 2 if size < 64 else size // 8  # 28 pixels have 14 x 14 places, 224 have 8 x 8
    centres = torch.arange((step - 1) / 2, size, step)
    near = (torch.arange(size) - centres[:, None]).abs() <= 1.5 * step
    square = (near[:, None, :, None] & near[None, :, None, :]).view(-1, 1, size, size)
    colour = border_of(picture).median(1).values.view(-1, 1, 1)
    covered = torch.where(square, colour, picture)
    parts = [picture[None], *covered.split(32)]
    logs = torch.cat([predictor(part)[:, answer] for part in parts]).clamp(1e-9).log()
    loss = (logs[0] - logs[1:]).view(1, 1, len(centres), -1)
    loss = F.interpolate(loss, (size, size), mode="bilinear")[0, 0]
    return loss / loss.abs().max().clamp(1e-4)


def build_picture_page(page: Any, predictor: Any) -> None:
    """Build a place for a picture file, and a pad to draw on if that fits."""
    import gradio

    has_pad = predictor.metadata["input"] == "picture"
    answer_box = gradio.HTML(answer_picture(predictor, None)[0], elem_classes="said")
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
                page.load(None, js=Path(__file__).with_name("page.js").read_text())
            with gradio.Accordion("a picture file", open=not has_pad):
                file = gradio.File(file_types=["image"], elem_id="file", show_label=False)
        with gradio.Column(min_width=320):
            shares = gradio.HTML()
            why = gradio.Gallery(columns=2, format="png", elem_id="why", show_label=False)
    shown = [answer_box, shares, why]
    file.change(partial(answer_picture, predictor), file, shown, **QUICK)
    if has_pad:
        pad.change(partial(answer_pad, predictor), pad, shown, **QUICK)


def answer_row(predictor: Any, *cells: Any) -> str:
    """Return what is predicted for a row, as HTML.

    cells: a value for each column of the metadata; a date is a text such as 2020-01-31.
    """
    metadata = predictor.metadata
    columns = [Column(**column) for column in metadata["columns"]]
    row = {column.name: [cell] for column, cell in zip(columns, cells, strict=True)}
    inputs, problems = encode(pd.DataFrame(row), columns)
    if problems:
        _, name, problem = problems[0]
        return escape(f"{name}: {problem}")
    outputs = predictor(torch.from_numpy(inputs))[0]
    if "classes" in metadata:
        said = [predictor.describe(outputs)]
    else:
        each = zip(metadata["targets"], outputs.tolist(), usual_errors(predictor), strict=True)
        said = [f"{in_words(name)}: {write_known(value, off)}" for name, value, off in each]
    return "".join(f"<h2>{escape(text)}</h2>" for text in said)


def rounded(value: float, digits: int) -> str:
    """Write a number with so many digits: 3,650, and neither 3.65e+03 nor 3650.0."""
    return f"{Decimal(np.format_float_positional(value, digits, fractional=False, trim='-')):,f}"


def write_known(value: float, off: float) -> str:
    """Write a number to two digits of its usual error: about 3,650 of 3,648.46 if off by 189."""
    if not off or not np.isfinite([value, off]).all():
        return rounded(value, 6)
    known = round(float(f"{value:.6g}"), 1 - math.floor(math.log10(off)))
    return f"about {rounded(known + 0.0, 15)}"  # not -0


def usual_errors(predictor: Any) -> list[float]:
    """Return for each target by how much half of the evaluated samples are off; 0: not known."""
    prediction, target = (predictor.evaluated.get(key) for key in ("prediction", "target"))
    if prediction is None or target is None:
        return [0.0] * len(predictor.metadata["targets"])
    return (prediction - target).abs().median(0).values.tolist()


def in_words(name: str) -> str:
    """Return the name of a column as it is shown."""
    return name.replace("_", " ").strip() or name


def first_row(predictor: Any) -> np.ndarray:
    """Return the features of an evaluated row that lacks no cell, or else their means."""
    metadata = predictor.metadata
    low, high = np.array(metadata["feature_range"]).T
    rows = predictor.evaluated.get("feature", torch.zeros(0, len(low))).double().numpy()
    for column in (Column(**column) for column in metadata["columns"]):
        first = metadata["features"].index(column.feature_names()[0])
        if column.categories is not None:
            known = [first + n for n, text in enumerate(column.categories) if text not in MISSING]
            rows = rows[(rows[:, known] > 0.5).any(1)]  # they have been in float32
        elif column.fill is not None:
            rows = rows[~np.isclose(rows[:, first], column.fill)]
    rows = rows[(np.abs(rows - rows.clip(low, high)) <= 1e-5 * (high - low) + 1e-6).all(1)]
    return np.concatenate([rows, [metadata["feature_mean"]]])[0]


def make_field(metadata: dict[str, Any], column: Column, row: np.ndarray) -> Any:
    """Make a list of categories, a date, or a slider, which begins with the features of a row."""
    import gradio

    label = in_words(column.name)
    names = column.feature_names()
    number = metadata["features"].index(names[0])
    if column.categories is not None:
        begin = column.categories[row[number : number + len(names)].argmax()]
        return gradio.Dropdown(column.categories, value=begin, label=label, render=False)
    low, high = metadata["feature_range"][number]
    if column.days:
        days = (row[number], low, high)
        day, first, last = (str(np.datetime64(round(day), "D")) for day in days)
        return gradio.Textbox(day, label=label, info=f"in training {first} to {last}", render=False)
    is_whole = metadata["feature_whole"][number]
    start = round(row[number]) if is_whole else float(f"{row[number]:.6g}")
    step = 1.0 if is_whole else None
    return gradio.Slider(low, high, start, step=step, label=label, render=False)


def build_table_page(page: Any, predictor: Any) -> None:
    """Build a field for each column."""
    import gradio

    columns = [Column(**column) for column in predictor.metadata["columns"]]
    row = first_row(predictor)
    inputs = [make_field(predictor.metadata, column, row) for column in columns]
    answer = answer_row(predictor, *(field.value for field in inputs))
    answer_box = gradio.HTML(answer, elem_classes="said")
    for field in inputs:
        field.render()
        field.change(partial(answer_row, predictor), inputs, answer_box, **QUICK)


def answer_text(predictor: Any, text: str) -> tuple:
    """Return what is shown for a text: the answer and the probabilities."""
    if not text.strip():
        return WHAT_TO_DO["text"], ""
    inputs, doubt = predictor.read(text)
    return answer_of_classes(predictor, predictor(inputs)[0], doubt)


def build_text_page(page: Any, predictor: Any) -> None:
    """Build a place for a text."""
    import gradio

    answer_box = gradio.HTML(WHAT_TO_DO["text"], elem_classes="said")
    text = gradio.Textbox(lines=8, label="a text", elem_id="text")
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


def describe_quality(predictor: Any) -> str:
    """Say what the model predicts, and how far off it was for the evaluated samples."""
    prediction, target = (predictor.evaluated.get(key) for key in ("prediction", "target"))
    names = [in_words(name) for name in predictor.metadata.get("targets", [])]
    if prediction is None or target is None:
        return f"It predicts {', '.join(names)}." if names else ""
    seen = f"{len(target):,} samples that it was not trained on"
    if "classes" in predictor.metadata:
        share = (prediction == target).double().mean()
        most = target.bincount().max() / len(target)
        what = f"predicts {names[0]}, and " if names else ""
        return f"It {what}is right for {share:.1%} of {seen}; the largest class has {most:.1%}."
    return " ".join(
        f"It predicts {name}, and is off by less than {rounded(half, 3)} for half of {seen}."
        for name, half in zip(names, usual_errors(predictor), strict=True)
    )


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
