"""Draw in the browser and watch a trained model answer, on this machine and without a network.

python app.py runs/mnist
python app.py runs/regression
"""

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

import predict
from modelkit import page
from trainkit import arguments, plots, startup, tables
from trainkit.errors import UsageError
from trainkit.images import load_images, read_picture

FOR, AGAINST = torch.tensor([[213.0, 94, 0], [0, 114, 178]])  # orange and blue of trainkit.plots
HINT = ["<p>Draw, and let go: the answer comes as the stroke ends.</p>", ""]


@torch.inference_mode()
def evidence(model: nn.Module, picture: torch.Tensor, answer: int) -> torch.Tensor:
    """How much each place of a picture speaks for the answer, (size, size), from -1 to 1.

    By occlusion: what the log of its probability loses if 6 x 6 pixels there are blackened.
    """
    size, places = len(picture), torch.arange(0.5, len(picture), 2)
    near = (torch.arange(size) - places[:, None]).abs() <= 3
    window = near[:, None, :, None] & near[None, :, None, :]
    covered = picture.masked_fill(window.view(-1, 1, size, size), 0)
    logs = torch.cat([model(part)[:, answer] for part in covered.split(64)]).clamp(1e-9).log()
    loss = model(picture[None, None])[0, answer].clamp(1e-9).log() - logs
    loss = F.interpolate(loss.view(1, 1, len(places), -1), (size, size), mode="bilinear")[0, 0]
    return loss / loss.abs().max().clamp(0.01)


@torch.inference_mode()
def describe(model: nn.Module, classes: list[str], picture: torch.Tensor, note: str) -> list[str]:
    """HTML: the answer with bars in the order of the classes; what is seen, and what speaks."""
    probabilities = model(picture[None, None])[0]
    answer = int(probabilities.argmax())
    speaks = evidence(model, picture, answer)[..., None]
    ink = picture[..., None] * 0.7 * (1 - speaks.abs())
    overlay = ink + speaks.clamp(min=0) * FOR - speaks.clamp(max=0) * AGAINST
    said = f"<h2>{escape(classes[answer])} <small>{escape(note)}</small></h2>"
    views = {
        "what the network sees": picture.numpy(),
        f"orange speaks for {classes[answer]}, blue against": overlay.byte().numpy(),
    }
    return [said + page.bars(classes, probabilities.tolist()), page.views(views)]


def first_examples(run_dir: Path, about: dict[str, Any]) -> tuple[torch.Tensor, list[int]]:
    """The first test picture of each class; none where the data are gone."""
    try:
        said = json.loads((run_dir / "run.json").read_text())["arguments"]
        data, *_ = load_images(said["dataset"], "test", about["size"], said.get("label"),
                               about["classes"])  # fmt: skip
    except (UsageError, OSError, KeyError, ValueError):
        return torch.empty(0), []
    images, truth = data.tensors
    labels = truth.unique()[:20].tolist()
    return images[[int((truth == label).nonzero()[0]) for label in labels], 0], labels


def classifier_page(gr: Any, run_dir: Path, model: nn.Module, about: dict[str, Any]) -> None:
    """A canvas, a place to drop a picture, the answer, examples and mistakes to click on."""
    classes = about["classes"]

    def read(value: dict[str, str] | str | None) -> list[str]:
        path = value["composite"] if isinstance(value, dict) else value
        if path is None:
            return HINT
        try:
            picture = read_picture(Path(path), about["size"], about["pictures"])[0, 0]
        except UsageError as problem:
            return [f"<p>{escape(str(problem).replace(path, 'the picture'))}</p>", ""]
        return describe(model, classes, picture, "")

    def shelf(title: str, name: str, pictures: torch.Tensor, notes: list[str]) -> None:
        def choose(event: gr.SelectData) -> list[str]:
            truth = f"(it {notes[event.index]})"
            return describe(model, classes, pictures[event.index], truth)

        if notes:
            gallery = gr.Gallery(list(zip(pictures.numpy(), notes, strict=True)), label=title,
                                 format="png", allow_preview=False, interactive=False,
                                 height="auto", buttons=[], elem_id=name)  # fmt: skip
            gallery.select(choose, None, answer, show_progress="hidden")

    gr.Markdown(f"### Draw {', '.join(classes)}")
    with gr.Row():
        with gr.Column(min_width=300):  # a canvas directly in a row is twice as wide as its box
            pad = gr.Sketchpad(canvas_size=(280, 280), fixed_canvas=True, height=380, layers=False,
                               image_mode="L", type="filepath", format="png", transforms=(),
                               buttons=[], show_label=False, elem_id="pad",
                               brush=gr.Brush(11, colors=["#000000"], color_mode="fixed"),
                               )  # fmt: skip
        with gr.Column(min_width=300):
            answer = [gr.HTML(HINT[0], elem_id="answer")]
        with gr.Column(min_width=300):
            answer.append(gr.HTML(elem_id="views"))
            # Not gr.Image, which would open the file before read_picture can refuse it.
            dropped = gr.File(file_types=["image"], label="or a picture", height=140,
                              elem_id="dropped")  # fmt: skip
    pictures, labels = first_examples(run_dir, about)
    shelf("Test pictures", "examples", pictures, [f"is {classes[label]}" for label in labels])
    path = run_dir / plots.PREDICTIONS
    tensors = plots.load_predictions(path)[0] if path.exists() else {}
    if "mistake_images" in tensors:
        worst = plots.worst_mistakes(*(tensors[k] for k in ("prediction", "target", "probability")))
        notes = [f"is {classes[tensors['target'][index]]}" for index in worst]
        shelf("Worst mistakes", "mistakes", tensors["mistake_images"][:, 0], notes)
    for source in (pad, dropped):
        source.change(read, source, answer, show_progress="hidden", trigger_mode="always_last")
    gr.on([gr.context.Context.root_block.load, pad.clear], js=page.PICK_BRUSH)


def regression_page(gr: Any, run_dir: Path, model: nn.Module, about: dict[str, Any]) -> None:
    """A control for each feature, the prediction, and its curve along one of them."""
    columns = [tables.Column(**column) for column in about["columns"]]
    ranges = {}  # three standard deviations of the training rows to each side, in round steps
    for column in columns:
        if column.categories is None:
            number = about["features"].index(column.name)
            mean, std = about["feature_mean"][number], about["feature_std"][number]
            step = 10.0 ** math.floor(math.log10(std / 5))
            ranges[column.name] = [step * round((mean + k * std) / step) for k in (-3, 3, 0)]

    @torch.inference_mode()
    def outputs(rows: pd.DataFrame) -> np.ndarray:
        return model(torch.from_numpy(tables.encode(rows, columns, "the form"))).numpy()

    def answer(along: str | None, *values: Any) -> str:
        row = pd.DataFrame([dict(zip((c.name for c in columns), values, strict=True))])
        if row.isna().any(axis=None):
            return "<p>Fill in every field.</p>"
        pairs = zip(about["targets"], outputs(row)[0], strict=True)
        said = "".join(f"<h2>{escape(name)}: {value:,.6g}</h2>" for name, value in pairs)
        return said + (curve(row, along) if along else "")

    def curve(row: pd.DataFrame, along: str) -> str:
        few = about["targets"][:4]
        figure = plots.new_figure(4.4, 2.8 * len(few))
        grid = figure.subplots(len(few), 1, squeeze=False)
        x = np.linspace(ranges[along][0], ranges[along][1], 121)
        y = outputs(row.loc[[0] * len(x)].reset_index(drop=True).assign(**{along: x}))
        for number, (axes, name) in enumerate(zip(grid.flat, few, strict=True)):
            axes.plot(x, y[:, number], color=plots.COLOURS[4])
            axes.plot(row[along], outputs(row)[:, number], "o", color=plots.COLOURS[1])
            axes.set(xlabel=along, ylabel=name)
        return page.drawing(figure, f"the prediction along {along}")

    gr.Markdown(f"### Predict {', '.join(about['targets'])}")
    with gr.Row():
        with gr.Column(min_width=300):
            controls = [
                gr.Slider(*ranges[c.name], label=c.name)
                if c.categories is None
                else gr.Dropdown(c.categories, value=c.categories[0], label=c.name)
                for c in columns
            ]
        with gr.Column(min_width=300):
            names = list(ranges)
            along = gr.Dropdown(names, value=names[0] if names else None, label="curve along")
            said = gr.HTML(elem_id="answer")
    inputs = [along, *controls]
    gr.on([c.change for c in inputs] + [gr.context.Context.root_block.load], answer, inputs, said,
          show_progress="hidden", trigger_mode="always_last")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments.Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("run_dir", type=Path, nargs="?", default=Path("runs/mnist"), help="of a finished run")
    add("--host", default="127.0.0.1", help="0.0.0.0: other machines may use the page too")
    add("--port", type=int, default=None, help="None: the first free one from 7860 on")
    args = parser.parse_args(argv)
    if not (args.run_dir / "model.safetensors").is_file():
        raise UsageError(f"{args.run_dir} is not a finished run: make one with "
                                f"`python train_mnist.py --run-dir {args.run_dir}`")  # fmt: skip
    model, about = predict.load_run(args.run_dir)
    pages = {"pictures": classifier_page, "columns": regression_page}
    build = next((pages[name] for name in pages if name in about), None)
    if build is None:
        raise UsageError(f"{args.run_dir}: app.py has no page for models of {about['script']}.py")
    page.serve(lambda gr: build(gr, args.run_dir, model, about), str(args.run_dir), args.host,
               args.port)  # fmt: skip


if __name__ == "__main__":
    startup.run(main)
