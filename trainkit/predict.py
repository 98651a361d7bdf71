"""Use a trained model: classify pictures or texts, or add predictions to the rows of a table.

python predict.py runs/mnist digit.png photo.jpg
python predict.py runs/pictures folder/ --csv answers.csv
python predict.py runs/regression table.csv
python predict.py runs/text lines.txt
python predict.py runs/mine --script ../mine/train_mine.py table.csv
python predict.py runs/mnist --export --push OWNER/NAME

`python -m trainkit.predict` is the same in a folder without predict.py, after `pip install .`.
For a script of your own see docs/results.md.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

from trainkit import (
    CLONE,
    PREDICTIONS,
    Classifier,
    Predictor,
    from_exact_json,
    load_predictions,
    name_without_compiler,
    printable,
    refuse_pipe,
    startup,
    tables,
    texts,
)

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tyro.conf import Positional

from trainkit.config import flag, parse
from trainkit.errors import UsageError, as_usage_error
from trainkit.pictures import is_picture, learn_framing, read_photo, read_photo_pixels, standardise

# Of training scripts. An installed kit has none, and its neighbours are other packages.
FOLDERS = (CLONE, CLONE / "examples") if CLONE else ()


class PixelClassifier(Classifier):
    """Classifies pictures, uint8 (n, channels, size, size)."""

    def prepare(self, inputs: torch.Tensor) -> torch.Tensor:
        return standardise(inputs, self.metadata)

    def example_inputs(self) -> torch.Tensor:
        channels = self.numbers("mean").numel()
        size = self.metadata["size"]
        return torch.randint(0, 256, (4, channels, size, size), dtype=torch.uint8)


class PicturePredictor(PixelClassifier):
    """Classifies small grey pictures that are much alike; photos are made to look like them."""

    options = ("as_is",)

    @cached_property
    def framing(self) -> dict[str, Any]:
        """What the evaluated pictures have in common."""
        learned = {"border": [0.0, 1.0], "framed": False}
        if "image" in self.evaluated:
            learned = learn_framing(self.evaluated["image"])
        return self.metadata["pictures"] | learned

    def read(self, path: Path | BytesIO, as_is: bool = False) -> tuple[torch.Tensor, str]:
        reading = self.metadata.get("reading", {})
        return read_photo(path, self.metadata["size"], self.framing, as_is, **reading)


class PhotoPredictor(PixelClassifier):
    """Classifies photos in colour of any size."""

    weights = "pretrained/model.safetensors"  # with --freeze the other file has the last layer only

    def read(self, path: Path | BytesIO) -> tuple[torch.Tensor, str]:
        with as_usage_error(f"{path} cannot be read as a picture"):
            sides = self.metadata["resize"], self.metadata["size"]
            pixels = read_photo_pixels(path, *sides, **self.metadata.get("reading", {}))
        return pixels[None], ""


class OwnPredictor(Predictor):
    """The model of a script that has answer(model, metadata, path): a text, printed as it is."""

    def open(self, script: Any, run_dir: Path) -> None:
        self.answer = script.answer

    def predict_file(self, path: Path) -> str:
        return self.answer(self.model, self.metadata, path)


# What a script may give as "input" in its metadata, and what then uses its model.
KINDS: dict[str, Callable[[], type[Predictor]]] = {
    "picture": lambda: PicturePredictor,
    "photo": lambda: PhotoPredictor,
    "table": lambda: tables.TablePredictor,  # pandas takes half a second
    "table_class": lambda: tables.TableClassifier,
    "text": lambda: texts.TextPredictor,
}


def load_run(run_dir: Path, script_path: Path | None = None) -> Any:
    """Return the trained predictor of a run folder, one of KINDS. Raises UsageError.

    script_path: the script that made the run; None: the script of that name in FOLDERS.
    """
    path = run_dir / "model.safetensors"
    if not path.is_file():
        raise UsageError(f"{run_dir} is not a finished run: it has no {path.name}")
    with as_usage_error(f"{path} is not a model of these scripts"):
        with safe_open(path, framework="pt") as file:
            metadata = from_exact_json((file.metadata() or {})["trainkit"])
        evaluated, _ = load_predictions(run_dir / PREDICTIONS)
        script = load_script(script_path or find_script(metadata["script"]))
        find_kind = KINDS.get(metadata.get("input", ""))
        if hasattr(script, "answer"):
            find_kind, metadata["input"] = lambda: OwnPredictor, "file that answer() reads"
        if find_kind is None or not hasattr(script, "make_model"):
            raise UsageError(
                f"{metadata['script']}.py made the run, and predict.py needs two things from it: "
                "make_model(metadata), and answer(model, metadata, path) or, in what it gives "
                f'run.begin, "input", one of {", ".join(KINDS)} (docs/results.md); a language '
                f"model answers to `python -m trainkit.language.ask {run_dir}`"
            )
        kind = find_kind()
        model = name_without_compiler(script.make_model(metadata))
        model.load_state_dict(load_file(run_dir / kind.weights))
        predictor = kind(model, metadata, evaluated).eval().requires_grad_(False)
        predictor.open(script, run_dir)
        return predictor


def find_script(name: str) -> Path:
    """Return the script of this name in FOLDERS, which must not be a link. Raises UsageError."""
    for folder in FOLDERS:
        path = folder / f"{name}.py"
        if str(name).isidentifier() and path.is_file() and not path.is_symlink():
            return path
    raise UsageError(
        f"the run was made by {name}.py, which is not beside predict.py: say where it is with "
        "--script PATH"
    )


def load_script(path: Path) -> Any:
    """Import a script, with its folder on sys.path for its own imports. Raises UsageError."""
    spec = importlib.util.spec_from_file_location("training_script", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"--script {path} is not a Python file")
    sys.path.append(str(path.resolve().parent))
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # for dataclasses
    spec.loader.exec_module(script)
    return script


@dataclass
class Config:
    run_dir: Positional[Path]
    """folder of a finished run"""
    files: Positional[list[Path]] = field(default_factory=list)
    """pictures, tables, or texts, of any kind that trains; of a folder all pictures below it"""
    csv: Path | None = None
    """also write the answers for pictures into this file: a row for each"""
    script: Path | None = None
    """the script that made the run, if it is not beside predict.py or in examples/"""
    as_is: bool = False
    """pictures look like the training pictures: resize them, no more"""
    encoding: str | None = None
    """of tables and texts, such as cp1252 (default: as in training, or UTF-8 if they are)"""
    sheet: str | None = None
    """of an Excel file, or several as a,b (default: as in training)"""
    header_row: int | None = None
    """line of a table, or row of a sheet, that has the names (default: as in training)"""
    export: bool = False
    """write RUN_DIR/export/: the weights, and model.onnx, which needs no PyTorch"""
    push: str | None = None
    """OWNER/NAME: export, and upload the folder to the Hugging Face Hub"""

    MOVED = {"--license": "write it into RUN_DIR/export/README.md, before a --push"}  # noqa: RUF012


def main(argv: Sequence[str] | None = None) -> None:
    """Predict files, export the run, or do both."""
    config = parse(Config, argv)
    exports = config.export or config.push
    if not config.files and not exports:
        raise UsageError("name the files to predict, or --export")
    predictor = load_run(config.run_dir, config.script)
    kind = predictor.metadata["input"]
    names = ("as_is", "encoding", "sheet", "header_row")
    options = {name: vars(config)[name] for name in names if vars(config)[name]}
    for name in options.keys() - {*predictor.options}:
        raise UsageError(f"{flag(name)} does not apply to a model whose input is a {kind}")
    if config.sheet:
        options["sheet"] = config.sheet.split(",")
    if exports:
        from trainkit.tools import export

        with as_usage_error(f"{config.run_dir} cannot be exported"):
            folder = export.write_export(predictor, config.run_dir)
        print(folder)
        if config.push:
            print(export.push(folder, config.push))
    paths = config.files
    if isinstance(predictor, PixelClassifier):
        paths = [file for path in paths for file in find_pictures(path)]
    elif config.csv:
        raise UsageError(f"--csv is for pictures, and the input of this model is a {kind}")
    predict_files(predictor, paths, options, config.csv)


def find_pictures(path: Path) -> list[Path]:
    """Return all pictures below a folder, in the order of their names; or the path of a file.

    Hidden files are left out, and folders behind links. Raises UsageError if there is none.
    """
    with as_usage_error(f"{path} cannot be read"):  # as a name that is too long cannot
        if not path.is_dir():
            return [path]
        below = sorted((file for file in path.rglob("*") if file.is_file()), key=str)
    pictures = [file for file in below if is_picture(file.relative_to(path))]
    if not pictures:
        raise UsageError(f"{path} is a folder with no picture files in it")
    return pictures


def predict_files(
    predictor: Any, paths: Sequence[Path], options: dict[str, Any], csv_path: Path | None = None
) -> None:
    """Print the prediction for each file. Raises UsageError at the end if a file is unusable.

    csv_path: a file for the answers for pictures too, a row for each, also for unusable ones.
    """
    rows: list[dict[str, Any]] = []
    for path in paths:
        row: dict[str, Any] = {"file": str(path)}
        try:
            with as_usage_error(f"{path} cannot be used"):
                refuse_pipe(path, str(path))
                if csv_path:
                    answer, more = predictor.answer_file(path, **options)
                    row |= more
                else:
                    answer = predictor.predict_file(path, **options)
        except UsageError as error:
            if len(paths) == 1 and csv_path is None:
                raise
            row["error"] = str(error)
            answer = f"error: {error}"
        print(printable(answer), flush=True)
        rows.append(row)
    if csv_path is not None:
        print(printable(tables.write_answers(csv_path, rows)))
    if failed := sum("error" in row for row in rows):
        raise UsageError(f"{failed} of {len(paths)} files cannot be used")


if __name__ == "__main__":
    startup.run(main, prints_results=True)
