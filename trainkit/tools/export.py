"""Export a finished run as a folder that works without this repository, and upload it."""

import html
import importlib.util
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from trainkit.errors import RunFailure, UsageError, as_usage_error
from trainkit.plots import figures
from trainkit.reading import pieces
from trainkit.store.atomic import write_json
from trainkit.store.jsons import to_json
from trainkit.store.records import last_evaluation, read_run_json

TOLERANCE = 1e-5  # between PyTorch and onnxruntime, relative to the largest output
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TASKS = {  # the Hub's name of what a model does, by the "input" of the metadata
    "picture": "image-classification",
    "photo": "image-classification",
    "table": "tabular-regression",
    "table_class": "tabular-classification",
}


def write_export(predictor: Any, run_dir: Path, license: str | None = None) -> Path:
    """Write RUN_DIR/export/: model.onnx, weights, an example, a model card. Return the folder.

    predictor: what predict.load_run returns. license: that of the weights, in the Hub's short form.
    Raises UsageError if a package is missing or the run is incomplete, RunFailure if onnxruntime
    gives other outputs than PyTorch.
    """
    if predictor.metadata["input"] not in TASKS:
        raise UsageError(
            f"--export cannot take a model whose input is a {predictor.metadata['input']}: copy "
            "its run folder, which is all that predict.py and app.py need beside the scripts"
        )
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise UsageError(f"--export needs more packages: pip install {' '.join(missing)}")
    with as_usage_error(f"{run_dir} is not complete"):
        run = read_run_json(run_dir)
        metrics = last_evaluation(run_dir)
        num_samples = metrics["eval_samples"]
        # Of paths from the root, the home folder or the parent, only the last part is published.
        words = [re.sub(r"^(.*=)?(/|~|\.\.|\w:).*[/\\]", r"\1", word) for word in run["command"]]
    folder = run_dir / "export"
    folder.mkdir(exist_ok=True)
    write_onnx(predictor, folder / "model.onnx")
    # In pretrained/, beside the weights of a photo's network, is what timm needs to load them.
    weights = run_dir / predictor.weights
    pictures = [run_dir / name for name in ("confusion.png", "fit.png", "curves.png")]
    copied = [
        shutil.copyfile(path, folder / path.name).name
        for path in (weights, weights.with_name("config.json"), *pictures)
        if path.exists()
    ]
    texts = [column for column in predictor.metadata.get("columns", []) if column.get("scores")]
    if texts:  # what makes numbers of them
        copied.append(shutil.copyfile(pieces.__file__, folder / "pieces.py").name)
    facts = {
        "texts": [escape(column["name"]) for column in texts],
        "title": escape(run_dir.resolve().name),
        "predictor": predictor,
        "run": run,
        "command": write_code(shlex.join(["python", *words])),
        "num_parameters": sum(weight.numel() for weight in predictor.parameters()),
        "num_samples": num_samples,
        "metrics": {
            name[5:]: metrics[name]
            for name in metrics
            if name.startswith("eval_") and name != "eval_samples"
        },
        "copied": copied,
        "answer": write_example(predictor, folder),
    }
    write_card(facts, license, folder / "README.md")
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


def write_example(predictor: Any, folder: Path) -> str:
    """Write an evaluated sample, and return what the code of the card prints for it."""
    metadata = predictor.metadata
    evaluated = predictor.evaluated
    inputs = predictor.example_inputs()
    if "features" in metadata:
        inputs = evaluated.get("feature", inputs)[:1]
        row = dict(zip(metadata["features"], inputs[0].tolist(), strict=True))
        write_json(folder / "example.json", row)
    else:  # of photos the last one has the smallest loss
        *_, pixels = [*figures.saved_pictures(evaluated).values()] or inputs
        Image.fromarray(figures.to_array(pixels)).save(folder / "example.png")
        is_photo = metadata["input"] == "photo"
        inputs = predictor.read(folder / "example.png")[0] if is_photo else pixels[None]
    outputs = predictor(inputs)[0]
    if "classes" in metadata:
        share, number = outputs.max(0)
        return f"{metadata['classes'][number]} {share:.2%}"
    answers = zip(metadata["targets"], outputs, strict=True)
    return " ".join(f"{name} {value:,.6g}" for name, value in answers)


def write_card(facts: dict[str, Any], license: str | None, path: Path) -> None:
    """Write the model card from the facts and the template card.md."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    task = TASKS[facts["predictor"].metadata["input"]]
    data = ModelCardData(
        model_name=facts["title"],
        license=license,
        library_name="timm" if "config.json" in facts["copied"] else None,
        pipeline_tag=task,
        tags=["onnx", "safetensors", "accelerate"],
        metrics=[*facts["metrics"]],
        eval_results=[
            EvalResult(task, "custom", "evaluation set", metric, value)
            for metric, value in facts["metrics"].items()
        ],
    )
    metadata = facts["predictor"].metadata
    names = [*map(escape, metadata.get("classes") or metadata["targets"])]
    features = [*map(escape, metadata.get("features", []))]
    facts = facts | {"names": names, "features": features, "answer": escape(facts["answer"])}
    template = Path(__file__).with_name("card.md")
    ModelCard.from_template(data, template_path=str(template), **facts).save(path)


def escape(text: str) -> str:
    """Write a name for Markdown, on one line: neither markup nor HTML nor formulas are in it."""
    text = html.escape(" ".join(str(text).split()), quote=False)
    text = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", text)
    # What would begin a heading or a list if it stood at the beginning of a line.
    return re.sub(r"^(\d*)([-+#=.)])(?=\W|$)", r"\1\\\2", text)


def write_code(text: str) -> str:
    """Write code on one line of a table in Markdown."""
    text = " ".join(text.split()).replace("|", r"\|")
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}" if longest else f"{fence}{text}{fence}"


def push(folder: Path, name: str) -> str:
    """Upload a folder to the Hub as the model OWNER/NAME; return its address. Raises UsageError."""
    from huggingface_hub import HfApi

    with as_usage_error(f"--push {name}"):
        repository = HfApi().create_repo(name, exist_ok=True).repo_id
        text = "Upload a trained model"
        return str(
            HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message=text)
        )
