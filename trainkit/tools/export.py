"""Export a finished run as a folder that works without this repository, and upload it."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainkit.errors import RunFailure, UsageError, as_usage_error
from trainkit.store.jsons import to_json

TOLERANCE = 1e-5  # between PyTorch and onnxruntime, relative to the largest output
EXPORTED = ("picture", "photo", "table", "table_class")  # the "input" of the metadata


def write_export(predictor: Any, run_dir: Path) -> Path:
    """Write RUN_DIR/export/ with model.onnx and the weights, and return the folder.

    predictor: what predict.load_run returns. Raises UsageError if the input is of another kind,
    RunFailure if onnxruntime gives other outputs than PyTorch.
    """
    if predictor.metadata["input"] not in EXPORTED:
        raise UsageError(
            f"--export cannot take a model whose input is a {predictor.metadata['input']}: copy "
            "its run folder, which is all that predict.py and app.py need beside the scripts"
        )
    folder = run_dir / "export"
    folder.mkdir(exist_ok=True)
    write_onnx(predictor, folder / "model.onnx")
    # In pretrained/, beside the weights of a photo's network, is what timm needs to load them.
    weights = run_dir / predictor.weights
    for path in (weights, weights.with_name("config.json")):
        if path.exists():
            shutil.copyfile(path, folder / path.name)
    return folder


def write_onnx(predictor: Any, path: Path) -> None:
    """Write an ONNX program with the preprocessing inside, if it gives the predictor's outputs.

    Otherwise raises RunFailure and leaves the previous file in place.
    """
    import onnxruntime

    torch.manual_seed(0)
    inputs = predictor.example_inputs()
    temporary = path.with_name(".tmp-model.onnx")
    program = torch.onnx.export(
        predictor,
        (inputs,),
        dynamo=True,
        verbose=False,
        input_names=["inputs"],
        output_names=["outputs"],
        dynamic_shapes=[{0: torch.export.Dim("n")}],
    )
    program.model.metadata_props["trainkit"] = to_json(predictor.metadata)
    for node in program.model.graph:
        node.metadata_props.clear()  # they name paths of this machine
    program.save(temporary)
    session = onnxruntime.InferenceSession(temporary, providers=["CPUExecutionProvider"])
    expected = predictor(inputs).numpy()
    outputs = session.run(None, {"inputs": inputs.numpy()})[0]
    difference = float(np.abs(outputs - expected).max() / max(1e-30, np.abs(expected).max()))
    if not difference <= TOLERANCE:
        temporary.unlink()
        raise RunFailure(
            f"onnxruntime and PyTorch differ by {difference:.2g}, more than {TOLERANCE:g}: the "
            "exported model was removed"
        )
    os.replace(temporary, path)
    print(f"{path}: onnxruntime and PyTorch differ by {difference:.1g} on {len(inputs)} inputs")


def push(folder: Path, name: str) -> str:
    """Upload a folder to the Hub as the model OWNER/NAME; return its address. Raises UsageError."""
    from huggingface_hub import HfApi

    with as_usage_error(f"--push {name}"):
        repository = HfApi().create_repo(name, exist_ok=True).repo_id
        return str(HfApi().upload_folder(repo_id=repository, folder_path=folder))
