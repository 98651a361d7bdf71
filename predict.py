"""Use a trained model: tell what pictures show, or add predictions to the rows of a table.

python predict.py runs/mnist digit.png photo.jpg
python predict.py runs/regression table.csv
python predict.py runs/mnist --export onnx
"""

# isort: off
import trainkit  # noqa: F401  (before torch: it sets what torch reads only once)

# isort: on
import argparse
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors import SafetensorError, safe_open
from torch import nn

from trainkit import arguments, launch
from trainkit.grey import to_grey

TOLERANCE = 1e-5  # between PyTorch and the exported model, relative to the largest output
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class Classifier(nn.Module):
    """Grey values 0 to 255, uint8 (n, 1, size, size), to the probabilities of the classes."""

    def __init__(self, model: nn.Module, about: dict[str, Any]):
        super().__init__()
        self.model, self.mean, self.std = model, about["mean"], about["std"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model((inputs.float() / 255 - self.mean) / self.std).softmax(1)


class Regressor(nn.Module):
    """Features in their own units, float32 (n, features), to targets in theirs."""

    def __init__(self, model: nn.Module, about: dict[str, Any]):
        super().__init__()
        self.model = model
        for name in ("feature_mean", "feature_std", "target_mean", "target_std"):
            self.register_buffer(name, torch.tensor(about[name]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.model((inputs - self.feature_mean) / self.feature_std)
        return outputs * self.target_std + self.target_mean


def load_run(run_dir: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The trained model of a run folder, preprocessing inside, and what is saved beside it."""
    path = run_dir / "model.safetensors"
    if not path.is_file():
        raise launch.UsageError(f"{run_dir} is not a finished run: it has no {path.name}")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["trainkit"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        script = _script(about["script"])
        if "classes" in about:
            model = script.MODELS[about["model"]](len(about["classes"]))
            kind = Classifier
        else:
            sizes = len(about["features"]), len(about["targets"])
            model = script.MODELS[about["model"]](*sizes, about["hidden"])
            kind = Regressor
        model.load_state_dict(weights)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as problem:
        reason = str(problem).strip().splitlines()[0]
        raise launch.UsageError(f"{path} is not a model of these scripts: {reason}") from problem
    return kind(model, about).eval(), about


def read_picture(path: Path, size: int, as_is: bool = False) -> np.ndarray:
    """A picture file as the training pictures are: uint8 (size, size), bright ink on black.

    If the border is bright the picture is turned to its negative. A picture of another size is then
    framed as those of MNIST are: the ink is cut out, brought to 20/28 of `size` and its centre of
    mass is put into the middle. as_is: neither is done, the picture is only resized.
    Raises UsageError.
    """
    with launch.explained(f"{path} cannot be read as a picture"), Image.open(path) as file:
        grey = to_grey(ImageOps.exif_transpose(file))
    if as_is:
        return _resize(grey, size, size)
    border = np.concatenate((grey[0], grey[-1], grey[:, 0], grey[:, -1]))
    if np.median(border) > (grey.min() + grey.max()) / 2:
        grey, border = 255 - grey, 255 - border
    if grey.shape == (size, size):
        return grey.round().astype(np.uint8)
    ink = (grey - np.median(border)).clip(0)
    if ink.max() < 16:
        raise launch.UsageError(f"{path} is blank: nothing in it differs from its border")
    ink *= 255 / ink.max()
    rows, columns = np.nonzero(ink > 64)
    ink = ink[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    scale = size * 20 / 28 / max(ink.shape)
    ink = _resize(ink, *(max(1, round(side * scale)) for side in ink.shape))
    weight = ink.sum(dtype=np.float64)
    frame = np.zeros((size, size), np.uint8)
    corner = []
    for axis, side in enumerate(ink.shape):
        centre = (ink.sum(1 - axis) * np.arange(side)).sum() / weight
        corner.append(int(np.clip(round((size - 1) / 2 - centre), 0, size - side)))
    top, left = corner
    frame[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    return frame


@torch.inference_mode()
def predict_pictures(
    model: nn.Module, about: dict[str, Any], paths: Sequence[Path], as_is: bool
) -> None:
    """Print a line for each picture: its most probable classes."""
    pictures = [read_picture(path, about["size"], as_is) for path in paths]
    for path, picture in zip(paths, pictures, strict=True):
        probabilities = model(torch.from_numpy(picture)[None, None])[0]
        best = probabilities.topk(min(3, len(probabilities)))
        answers = [f"{about['classes'][index]} {probability:.2%}"
                   for probability, index in zip(*best, strict=True)]  # fmt: skip
        print(f"{path}: {answers[0]}  (then {', '.join(answers[1:])})")


@torch.inference_mode()
def predict_table(model: nn.Module, about: dict[str, Any], path: Path) -> Path:
    """Write TABLE_predictions.csv beside a CSV file: its rows and a column for each target."""
    import pandas as pd

    from trainkit import tables

    with launch.explained(f"{path} cannot be read as a table"):
        table = pd.read_csv(path, dtype=str)
    columns = [tables.Column(**column) for column in about["columns"]]
    features = torch.from_numpy(tables.encode(table, columns, str(path)))
    # In float64, so that standardising large numbers loses nothing that training had.
    predictions = model.double()(features).numpy()
    for number, name in enumerate(about["targets"]):
        table[f"predicted_{name}"] = predictions[:, number]
    output = path.with_name(f"{path.stem}_predictions.csv")
    table.to_csv(output, index=False)
    return output


@torch.inference_mode()
def export_onnx(model: nn.Module, about: dict[str, Any], run_dir: Path) -> Path:
    """Write RUN_DIR/model.onnx, preprocessing inside, after checking it against PyTorch.

    Raises UsageError if a package is missing, RunFailure if the outputs differ.
    """
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise launch.UsageError(f"--export onnx needs {', '.join(missing)}, not installed here: "
                                f"pip install {' '.join(missing)}")  # fmt: skip
    import onnxruntime

    generator = torch.Generator().manual_seed(0)
    if "classes" in about:
        size = about["size"]
        inputs = torch.randint(0, 256, (64, 1, size, size), generator=generator, dtype=torch.uint8)
    else:
        inputs = torch.randn(64, len(about["features"]), generator=generator)
        inputs = inputs * model.feature_std + model.feature_mean
    path, temporary = run_dir / "model.onnx", run_dir / ".tmp-model.onnx"
    program = torch.onnx.export(
        model, (inputs,), dynamo=True, verbose=False, input_names=["inputs"],
        output_names=["outputs"], dynamic_shapes={"inputs": {0: torch.export.Dim("n")}},
    )  # fmt: skip
    program.model.metadata_props["trainkit"] = json.dumps(about)
    program.save(temporary)
    session = onnxruntime.InferenceSession(temporary, providers=["CPUExecutionProvider"])
    expected = model(inputs).numpy()
    outputs = session.run(None, {"inputs": inputs.numpy()})[0]
    difference = float(np.abs(outputs - expected).max() / max(1e-30, np.abs(expected).max()))
    if not difference <= TOLERANCE:
        temporary.unlink()
        raise launch.RunFailure(f"onnxruntime and PyTorch differ by {difference:.2g}, more than "
                                f"{TOLERANCE:g}: the exported model was removed")  # fmt: skip
    os.replace(temporary, path)
    print(f"{path}: onnxruntime and PyTorch differ by {difference:.1g} on {len(inputs)} inputs")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    """Predict, or export."""
    parser = arguments.Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("run_dir", type=Path, help="folder of a finished run")
    add("files", nargs="*", type=Path, help="pictures, or tables as CSV")
    add("--as-is", action=argparse.BooleanOptionalAction, default=False,
        help="pictures are framed like the training pictures: resize them, no more")  # fmt: skip
    add(
        "--export",
        choices=("onnx",),
        default=None,
        help="also write model.onnx into the run folder",
    )
    args = parser.parse_args(argv)
    if not args.files and args.export is None:
        parser.error("name the files to predict, or --export onnx")
    model, about = load_run(args.run_dir)
    if args.export:
        export_onnx(model, about, args.run_dir)
    if "classes" in about:
        predict_pictures(model, about, args.files, args.as_is)
        return
    for path in args.files:
        print(predict_table(model, about, path))


def _script(name: str) -> ModuleType:
    """The training script beside this file that made the model: it holds the MODELS."""
    if not (isinstance(name, str) and (Path(__file__).parent / f"{name}.py").is_file()):
        raise launch.UsageError(f"the run was made by {name}.py, which is not beside predict.py")
    return importlib.import_module(name)


def _resize(grey: np.ndarray, height: int, width: int) -> np.ndarray:
    picture = Image.fromarray(grey.round().astype(np.uint8))
    return np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))


if __name__ == "__main__":
    launch.run(main)
