"""Use a trained model: tell what pictures show, or add predictions to the rows of a table.

python predict.py runs/mnist digit.png photo.jpg
python predict.py runs/regression table.csv
python predict.py runs/mnist --export onnx
python predict.py runs/mnist --export hub --push OWNER/NAME

How a file becomes an input, and an output words, is said by the class Predictor of the script that
made the run. A script of your own needs one for this, with

    __init__(self, about)          about: what run.begin was given; self.model is built, untrained
    forward(self, inputs)          what goes into model.onnx, preprocessing inside
    example_inputs(self)           a batch of 64, to compare model.onnx with PyTorch
    predict_file(self, path)       the words for one file; as_is=False or encoding=None as well, if
                                   --as-is or --encoding means a thing to it
"""

import contextlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from trainkit import startup

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from tyro.conf import Positional

from trainkit.cli.parse import flag, parse
from trainkit.cli.text import printable
from trainkit.errors import RunFailure, UsageError, as_usage_error
from trainkit.run_dir import records
from trainkit.run_dir.manifest import sha256_of

TOLERANCE = 1e-5  # between PyTorch and the exported model, relative to the largest output
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
FOLDERS = (Path(__file__).parent, Path(__file__).parent / "examples")  # of training scripts


def load_run(run_dir: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The Predictor of a run folder, trained, and what is saved beside its weights. UsageError."""
    path = run_dir / "model.safetensors"
    if not path.is_file():
        raise UsageError(f"{run_dir} is not a finished run: it has no {path.name}")
    with as_usage_error(f"{path} is not a model of these scripts"):
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["trainkit"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _, said = records.load_predictions(run_dir / records.PREDICTIONS)
        about |= {name: said[name] for name in said if name == "calibration"}
        script = _script(about["script"])
        if not hasattr(script, "Predictor"):
            raise UsageError(
                f"{script.__name__}.py, which made the run, has no class Predictor: write one, as "
                "in train_mnist.py, to let predict.py use its models"
            )
        # What about says is compared with the weights before it takes memory.
        with contextlib.suppress(RuntimeError), torch.device("meta"):
            if _shapes(script.Predictor(about).model.state_dict()) != _shapes(weights):
                raise ValueError("its weights are not those of the model that it names")
        predictor = script.Predictor(about)
        predictor.model.load_state_dict(weights)
    return predictor.eval(), about


@torch.inference_mode()
def export_onnx(predictor: nn.Module, about: dict[str, Any], run_dir: Path) -> Path:
    """Write RUN_DIR/model.onnx, preprocessing inside, after checking it against PyTorch.

    Raises UsageError if a package is missing, RunFailure if the outputs differ.
    """
    if missing := [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]:
        raise UsageError(f"--export onnx needs more packages: pip install {' '.join(missing)}")
    import onnxruntime

    torch.manual_seed(0)
    inputs = predictor.example_inputs()
    path, temporary = run_dir / "model.onnx", run_dir / ".tmp-model.onnx"
    program = torch.onnx.export(
        predictor,
        (inputs,),
        dynamo=True,
        verbose=False,
        input_names=["inputs"],
        output_names=["outputs"],
        dynamic_shapes=[{0: torch.export.Dim("n")}],
    )
    program.model.metadata_props["trainkit"] = json.dumps(about)
    program.model.metadata_props["weights"] = sha256_of(run_dir / "model.safetensors")
    temporary.unlink(missing_ok=True)
    program.save(temporary)
    session = onnxruntime.InferenceSession(temporary, providers=["CPUExecutionProvider"])
    expected = predictor(inputs).numpy()
    outputs = session.run(None, {"inputs": inputs.numpy()})[0]
    difference = float(np.abs(outputs - expected).max() / max(1e-30, np.abs(expected).max()))
    if not difference <= TOLERANCE:
        temporary.unlink()
        raise RunFailure(
            f"onnxruntime and PyTorch differ by {difference:.2g}, more than "
            f"{TOLERANCE:g}: the exported model was removed"
        )
    os.replace(temporary, path)
    print(f"{path}: onnxruntime and PyTorch differ by {difference:.1g} on {len(inputs)} inputs")
    return path


@dataclass
class Config:
    run_dir: Positional[Path]
    """folder of a finished run"""
    files: Positional[list[Path]] = field(default_factory=list)
    """pictures, or tables, of any kind that trains"""
    as_is: bool = False
    """pictures look like the training pictures: resize them, no more"""
    encoding: str | None = None
    """of the tables, such as cp1252 (default: as in training)"""
    export: Literal["onnx", "hub"] | None = None
    """also write RUN_DIR/model.onnx, or RUN_DIR/hub/ for others to load"""
    push: str | None = None
    """OWNER/NAME, with --export hub: upload it to the Hub; spaces/OWNER/NAME makes a page there"""
    license: str | None = None
    """with --export hub: of the weights, such as mit"""


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Predict, or export."""
    config = parse(Config, argv)
    if config.push and config.export != "hub":
        raise UsageError("--push goes with --export hub")
    if not config.files and config.export is None:
        raise UsageError("name the files to predict, or --export onnx or hub")
    predictor, about = load_run(config.run_dir)
    options = {name: vars(config)[name] for name in ("as_is", "encoding") if vars(config)[name]}
    for name in options.keys() - inspect.signature(predictor.predict_file).parameters.keys():
        raise UsageError(f"{flag(name)} means nothing to the models of {about['script']}.py")
    with as_usage_error(f"{config.run_dir} cannot be exported"):
        if config.export == "onnx":
            export_onnx(predictor, about, config.run_dir)
        if config.export == "hub":
            from trainkit.tools import hub

            folder = hub.write_hub(predictor, about, config.run_dir, config.license)
            print(folder)
            if config.push:
                print(hub.push(folder, config.push))
    if (config.run_dir / "checkpoints").exists() and not (config.run_dir / "DONE").exists():
        print(f"{config.run_dir} has not finished: these weights are of an earlier end of it")
    failed = 0
    for path in config.files:
        try:
            with as_usage_error(f"{path} cannot be used with {config.run_dir}"):
                said = predictor.predict_file(path, **options)
            print(printable(said), flush=True)
        except UsageError as error:
            if len(config.files) == 1:
                raise
            failed += 1
            print(printable(f"error: {error}"), flush=True)
    if failed:
        raise UsageError(f"{failed} of {len(config.files)} files cannot be used")


def _script(name: str) -> ModuleType:
    """The training script that made the model: a file of this repository, and no link out of it."""
    for folder in FOLDERS:
        path = folder / f"{name}.py"
        if str(name).isidentifier() and path.is_file() and not path.is_symlink():
            sys.path.append(str(folder))
            return importlib.import_module(name)
    raise UsageError(f"the run was made by {name}.py, which is not beside predict.py")


def _shapes(weights: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights.items()}


if __name__ == "__main__":
    startup.run(main)
