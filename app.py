"""Ask a trained model in the browser, on this machine and without a network.

python app.py runs/mnist         draw, choose a picture file, or pick a test picture
python app.py runs/regression    a field for each feature, and the prediction drawn along them
In a folder that predict.py --export hub wrote, this shows the model beside it.
"""

import base64
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

from trainkit import UsageError

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from tyro.conf import Positional

from trainkit.cli.parse import parse
from trainkit.errors import as_usage_error
from trainkit.launch import startup
from trainkit.tools import answers, page, plots
from trainkit.tools.photos import read_photo

HERE = Path(__file__).resolve().parent
EXPORTED = all((HERE / name).is_file() for name in ("model.py", "config.json"))
PARTS = (
    """<section>
  <canvas id="pad" width="280" height="280" role="img" aria-label="pad to draw on"></canvas>
  <button type="button" id="clear">Clear</button>
  <label>brush <input type="range" id="brush" min="4" max="36" value="16"></label>
</section>""",
    """<section id="answer">
  <div id="said" role="status" aria-atomic="true"><p>Here comes the answer.</p></div>
  <div id="details"></div>
</section>""",
    """<label class="file">a picture file:
  <input type="file" id="file" accept="image/*"></label>""",
)
DRAWN = """<div class="page">
<header><h1>{name}: {eval_accuracy:.2%} of {eval_samples:,} test pictures right</h1>
<p>It tells {some} apart: choose a picture, or draw one. You see how sure it is, what it sees and
what speaks for its answer. Whatever a picture shows, the answer is one of these.</p></header>
{parts}{shelves}</div>"""
FILLED_IN = """<div class="page">
<header><h1>{name}: R2 {eval_r2:.4f} on {eval_samples:,} rows</h1>
<p>Change a value, and the prediction of {targets} follows. The sliders span what the training rows
hold; the drawing is along the feature that was touched last.</p></header>
<form id="form">{fields}</form>
<section id="answer">
  <div id="said" role="status" aria-atomic="true"></div>
  <div id="details"></div>
</section></div>"""


def classifier_page(model: nn.Module, about: dict[str, Any], name: str) -> tuple[str, Callable]:
    """A pad, a place for a picture file, test pictures and mistakes; and what answers."""
    classes, examples, tensors = about["classes"], about["examples"], about["predictions"]
    shelves = {}
    if "labels" in examples:
        captions = [classes[label] for label in examples["labels"]]
        shelves["test picture"] = examples["inputs"][:, 0], captions
    if "mistake_images" in tensors:
        said, truth = tensors["prediction"], tensors["target"]
        worst = plots.worst_mistakes(said, truth, tensors["probability"])
        captions = [f"{classes[truth[i]]}, taken for {classes[said[i]]}" for i in worst]
        shelves["worst mistake"] = tensors["mistake_images"][:, 0], captions
    shown = "".join(page.shelf(kind, *shelf) for kind, shelf in shelves.items())

    def answer(asked: list[Any]) -> list[str]:
        kind, value = asked
        if kind != "file":
            return answers.describe(model, about, shelves[kind][0][value])
        file = BytesIO(base64.b64decode(value.partition(",")[2]))
        try:
            picture, doubt = read_photo(file, about["size"], about["pictures"])  # type: ignore[arg-type]
        except UsageError as problem:
            said = re.sub(r"\w+Error: ", "", str(problem).replace(str(file), "The picture"))
            remedy = ". Save it as PNG or JPEG." * ("cannot be read" in said)
            return [f"<p>{escape(said)}{remedy}</p>", ""]
        return answers.describe(model, about, picture[0, 0], doubt)

    some = escape(", ".join(classes[:12])) + " ..." * (len(classes) > 12)
    # Digits and letters can be drawn; of anything else a person has a picture.
    parts = PARTS if max(map(len, classes)) == 1 else reversed(PARTS)
    words = {"some": some, "parts": "".join(parts), "shelves": shown}
    return DRAWN.format(name=name, **words, **about["metrics"]), answer


def number_field(name: str, about: dict[str, Any]) -> tuple[str, tuple[float, float]]:
    """HTML: a number and a slider over what the training rows hold, in round steps; their range."""
    number = about["features"].index(name)
    mean, std = about["feature_mean"][number], about["feature_std"][number]
    low, high = about["feature_range"][number]
    whole = about["feature_whole"][number]
    step = 1.0 if whole else 10.0 ** math.floor(math.log10(std / 20))
    steps = math.floor(low / step), round(mean / step), math.ceil(high / step)
    low, start, high = (step * num for num in steps)
    limits = f'step="{step:g}" min="{low:.9g}" max="{high:.9g}" value="{start:.9g}"'
    html = (
        f'<input type="number" name="{escape(name)}" {limits}>'
        f'<input type="range" tabindex="-1" aria-hidden="true" {limits}>'
    )
    return html, (low, high)


def choice(name: str, options: Iterable[str]) -> str:
    """HTML: one of several texts."""
    texts = map(escape, options)
    html = "".join(f'<option value="{text}">{text}</option>' for text in texts)
    return f'<select name="{escape(name)}">{html}</select>'


def regression_page(model: nn.Module, about: dict[str, Any], name: str) -> tuple[str, Callable]:
    """A field for each column of the table; and the prediction, with its curve or surface."""
    features, targets = about["features"], about["targets"]
    fields, labels = dict[str, str](), ""
    ranges: dict[str, tuple[float, float]] = {}
    for column in about["columns"]:
        label = column["name"]
        if column["categories"] is None:
            fields[label], ranges[label] = number_field(label, about)
        else:
            fields[label] = choice(label, column["categories"])
        unit = " (days since 1970)" * ("days" in column)
        labels += f"<label>{escape(label)}{unit} {fields[label]}</label>"

    @torch.inference_mode()
    def outputs(rows: np.ndarray) -> np.ndarray:
        return model(torch.from_numpy(rows)).numpy()

    def answer(asked: list[str]) -> list[str]:
        touched, *texts = asked
        if "" in texts:
            return ["<p>Fill in every field.</p>", ""]
        given = dict(zip(fields, texts, strict=True))
        true = {f"{label}={value}" for label, value in given.items()}
        row = np.array([float(given[f]) if f in ranges else float(f in true) for f in features])
        pairs = zip(targets, outputs(row[None])[0], strict=True)
        said = "".join(f"<h2>{escape(target)}: {value:,.6g}</h2>" for target, value in pairs)
        for label, (low, high) in ranges.items():
            if not low <= float(given[label]) <= high:
                known = f"In training {escape(label)} was {low:g} to {high:g}"
                said += f"<p>{known}: beyond that the answer is a guess.</p>"
        if not ranges:
            return [said, ""]
        along = touched if touched in ranges else next(iter(ranges))
        feature = features.index(along), along
        return [said, answers.curve(outputs, row, feature, ranges[along], targets)]

    words = {"name": name, "targets": escape(", ".join(targets)), "fields": labels}
    return FILLED_IN.format(**words, **about["metrics"]), answer


def load(run_dir: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a run, and what is known of it; with an export's model.py, or predict.py.

    Raises UsageError.
    """
    if not (run_dir / "model.safetensors").is_file():
        raise UsageError(
            f"{run_dir} is not a finished run: make one with `python train_mnist.py "
            f"--run-dir {run_dir}`" + " in the repository" * EXPORTED
        )
    if not EXPORTED:
        import predict
        from trainkit.tools import hub

        model, about = predict.load_run(run_dir)
        return model, about | hub.describe_run(run_dir, about)
    with as_usage_error(f"{run_dir} does not hold what model.py here can load"):
        from model import load as load_model

        about = json.loads((run_dir / "config.json").read_text())
        examples = load_file(run_dir / "examples.safetensors")
        return load_model(run_dir), about | {"examples": examples, "predictions": {}}


@dataclass
class Config:
    run_dir: Positional[Path] = HERE if EXPORTED else Path("runs/mnist")
    """of a finished run"""
    host: str | None = None
    """0.0.0.0: for other machines too (default: GRADIO_SERVER_NAME, as of a Space, or 127.0.0.1)"""
    port: int | None = None
    """(default: the first free one from 7860 on)"""


def main(argv: Sequence[str] | None = None) -> None:
    """Open the page of a run."""
    config = parse(Config, argv)
    model, about = load(config.run_dir)
    pages = {"pictures": classifier_page, "columns": regression_page}
    build = next((pages[kind] for kind in pages if kind in about), None)
    if build is None:
        raise UsageError(f"{config.run_dir}: app.py has no page for models of {about['script']}.py")
    name = config.run_dir.resolve().name
    html, answer = build(model, about, escape(name))
    page.serve(html, answer, name, config.host, config.port)


if __name__ == "__main__":
    startup.run(main)
