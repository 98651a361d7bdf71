"""Draw in the browser and watch a trained model answer, on this machine and without a network.

In a folder that predict.py --export hub wrote, this shows the model beside it.

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
from torch import nn

from datakit import tables
from datakit.pictures import load_images
from modelkit import answers, page
from modelkit.photos import read_picture
from trainkit import arguments, plots, startup
from trainkit.errors import UsageError, as_usage_error

HERE = Path(__file__).resolve().parent
EXPORTED = all((HERE / name).is_file() for name in ("model.py", "config.json"))
HINT = ["<p>Draw, and let go: the answer comes as the stroke ends.</p>", ""]


def first_examples(run_dir: Path, about: dict[str, Any]) -> tuple[torch.Tensor, list[int]]:
    """The first test picture of each class; none where the data are gone."""
    try:
        said = json.loads((run_dir / "run.json").read_text())["arguments"]
        if not Path(said["dataset"]).exists():  # a Hub id: nothing here asks the network
            return torch.empty(0), []
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
        return answers.describe(model, classes, picture, "")

    def shelf(title: str, name: str, pictures: torch.Tensor, notes: list[str]) -> None:
        def choose(event: gr.SelectData) -> list[str]:
            truth = f"(it {notes[event.index]})"
            return answers.describe(model, classes, pictures[event.index], truth)

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
    """A control for each feature, the prediction, its curve along one or surface over two."""
    columns = [tables.Column(**column) for column in about["columns"]]
    ranges = {}  # three standard deviations of the training rows to each side, in round steps
    for column in columns:
        if column.categories is None:
            number = about["features"].index(column.name)
            mean, std = about["feature_mean"][number], about["feature_std"][number]
            step = 10.0 ** math.floor(math.log10(std / 5))
            ranges[column.name] = [step * round((mean + k * std) / step) for k in (-3, 3, 0)]

    both = [[*ranges]] if len(ranges) == 2 else []
    drawings = {" and ".join(names): names for names in [*both, *([name] for name in ranges)]}

    @torch.inference_mode()
    def outputs(rows: pd.DataFrame) -> np.ndarray:
        return model(torch.from_numpy(tables.encode(rows, columns, "the form"))).numpy()

    def answer(along: str | None, *values: Any) -> str:
        row = pd.DataFrame([dict(zip((c.name for c in columns), values, strict=True))])
        if row.isna().any(axis=None):
            return "<p>Fill in every field.</p>"
        pairs = zip(about["targets"], outputs(row)[0], strict=True)
        said = "".join(f"<h2>{escape(name)}: {value:,.6g}</h2>" for name, value in pairs)
        if along is None:
            return said
        return said + answers.landscape(outputs, row, ranges, drawings[along], about["targets"])

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
            names = [*drawings]
            along = gr.Dropdown(names, value=names[0] if names else None, label="drawn along")
            said = gr.HTML(elem_id="answer")
    inputs = [along, *controls]
    gr.on([c.change for c in inputs] + [gr.context.Context.root_block.load], answer, inputs, said,
          show_progress="hidden", trigger_mode="always_last")  # fmt: skip


def load(run_dir: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a run and what is saved about it, with predict.py or with an export's model.py.

    Raises UsageError.
    """
    if not (run_dir / "model.safetensors").is_file():
        raise UsageError(f"{run_dir} is not a finished run: make one with `python train_mnist.py "
                         f"--run-dir {run_dir}`" + " in the repository" * EXPORTED)  # fmt: skip
    if not EXPORTED:
        import predict

        return predict.load_run(run_dir)
    with as_usage_error(f"{run_dir} does not hold what model.py here can load"):
        import model

        return model.load(run_dir), json.loads((run_dir / "config.json").read_text())


def main(argv: Sequence[str] | None = None) -> None:
    """Open the page of a run."""
    parser = arguments.Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("run_dir", type=Path, nargs="?", default=HERE if EXPORTED else Path("runs/mnist"),
        help="of a finished run")  # fmt: skip
    add("--host", default=None, help="0.0.0.0: other machines may use the page too; "
        "None: GRADIO_SERVER_NAME, which a Space sets, or 127.0.0.1")  # fmt: skip
    add("--port", type=int, default=None, help="None: the first free one from 7860 on")
    args = parser.parse_args(argv)
    model, about = load(args.run_dir)
    pages = {"pictures": classifier_page, "columns": regression_page}
    build = next((pages[name] for name in pages if name in about), None)
    if build is None:
        raise UsageError(f"{args.run_dir}: app.py has no page for models of {about['script']}.py")
    title = HERE.name if args.run_dir == HERE else str(args.run_dir)
    page.serve(lambda gr: build(gr, args.run_dir, model, about), title, args.host, args.port)


if __name__ == "__main__":
    startup.run(main)
