"""A finished run as a folder for the Hugging Face Hub, and the way there.

Whoever has the folder needs neither this repository nor more than torch and safetensors; for the
page, app.py, what requirements.txt names.
"""

import contextlib
import inspect
import json
import math
import re
import runpy
import shlex
import shutil
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from trainkit.cli.text import shorten
from trainkit.data.pictures import load_images
from trainkit.errors import RunFailure, UsageError, as_usage_error
from trainkit.run_dir.files import write_durably, write_json
from trainkit.run_dir.manifest import sha256_of
from trainkit.run_dir.records import PREDICTIONS, last_evaluation, load_predictions, read_run_json
from trainkit.run_dir.weights import write_tensors
from trainkit.tools.space import ROOT, write_space

MAX_EXAMPLES = 20  # test pictures, one of a class
# What the source of a model may use.
IMPORTS = {
    "math": "import math",
    "Sequence": "from collections.abc import Sequence",
    "pairwise": "from itertools import pairwise",
    "F": "import torch.nn.functional as F",
    "Dropout": "from torch.nn import Dropout",  # for trainkit.loaders's: in use both do nothing
}
LOADER = '''"""{name}, with torch and safetensors alone: `model = load()`."""

import json
from pathlib import Path
{imports}
import torch
from safetensors.torch import load_file
from torch import nn


{network}

WHOLE

def load(folder=Path(__file__).parent):
    """The trained model, ready to use."""
    model = Model(json.loads((Path(folder) / "config.json").read_text()))
    model.network.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return model.eval()
'''
CLASSIFIER = '''class Model(nn.Module):
    """Grey values 0 to 255, uint8 (n, 1, size, size), to the probabilities of the classes."""

    def __init__(self, config):
        super().__init__()
        self.network = {kind}(len(config["classes"]))
        self.mean, self.std = config["mean"], config["std"]
        self.temperature = config.get("calibration", {{}}).get("temperature", 1.0)

    def forward(self, images):
        images = images.float().sub(255 * self.mean).mul(1 / (255 * self.std))
        outputs = self.network(images.contiguous(memory_format=torch.channels_last))
        return (outputs / self.temperature).softmax(1)
'''
REGRESSOR = '''class Model(nn.Module):
    """Features in their own units, float64 (n, features), to targets in theirs."""

    def __init__(self, config):
        super().__init__()
        sizes = len(config["features"]), len(config["targets"])
        self.network = {kind}(*sizes, config["hidden"])
        for name in ("feature_mean", "feature_std", "target_mean", "target_std"):
            self.register_buffer(name, torch.tensor(config[name], dtype=torch.float64))

    def forward(self, inputs):
        outputs = self.network(((inputs - self.feature_mean) / self.feature_std).float())
        return (outputs * self.target_std + self.target_mean).to(inputs.dtype)
'''
CARD = """---
{metadata}
sdk: gradio
sdk_version: 6.31.0
python_version: "3.11"
app_file: app.py
---

# {title}

{model}, {parameters:,} parameters, trained on {data} with plain PyTorch and Accelerate.

| measured on {samples:,} {split}, seed {seed} | |
| --- | --- |
{metrics}

| made by | |
| --- | --- |
| command | `{command}` |
| hardware | {hardware} |
| versions | {versions} |

{pictures}
## What it is for

{limits}

## Use

In this folder, with `pip install torch safetensors`:

```python
{example}
```
{more}
The folder on the Hub is brought to this machine by
`pip install huggingface_hub && hf download OWNER/NAME --local-dir FOLDER && cd FOLDER`.

`pip install -r requirements.txt && python app.py` opens a page in the browser that asks the
model. The folder is a Gradio Space as it is.

## License

Apache-2.0 (LICENSE) for the code in this folder. For the weights: {license}. The data keep their
own.
"""
OF_PICTURES = """from safetensors.torch import load_file
from model import load

inputs = load_file("examples.safetensors")["inputs"]  # {shape}: {look}
outputs = load()(inputs)  # probabilities of {names}
print({said})  # {answers}{truth}"""
OF_ROWS = """import torch
from model import load

row = {{  # a row of the data; column=text: 1 where the column holds the text, else 0
{row}
}}
outputs = load()(torch.tensor([[*row.values()]], dtype=torch.float64))  # {shape} to {names}
print({said})  # {answers}{truth}"""
FOR_PICTURES = """To tell {names} apart in pictures like those it was trained on, {look}. Whatever a
picture shows, the answer is one of these; an answer that is said with less than {threshold} is
among the 5 in 100 of which it is least sure. Nothing was measured on pictures from elsewhere."""
FOR_ROWS = """To predict {names} for rows like those of {data}. Nothing was measured beyond the
values of the training rows, which stand beside the example below."""
OF_FILES = """
A picture file (PNG, JPEG, ...) of any size, brought to what the network knows as predict.py does
it, with `pip install accelerate pillow`:

```python
import json
from pathlib import Path
from model import load
from trainkit.tools.photos import read_picture

config = json.loads(Path("config.json").read_text())
picture = read_picture(Path("example.png"), config["size"], config["pictures"])
probabilities = load()(picture)[0]
print(config["classes"][probabilities.argmax()], f"{{probabilities.max():.2%}}")  # {answer}
```
"""
OF_ONNX = """
`model.onnx` needs no PyTorch; with `pip install onnxruntime safetensors`:

```python
from onnxruntime import InferenceSession
from safetensors.numpy import load_file

inputs = load_file("examples.safetensors")["inputs"]  # {shape}
(outputs,) = InferenceSession("model.onnx").run(["outputs"], {{"inputs": inputs}})
print({said})  # {answers}
```
"""


def describe_run(run_dir: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The run's own record, last metrics, predictions, and tensors of examples. UsageError.

    Examples are inputs and labels: the first test picture of each class, none where the data are
    gone; the first evaluated row.
    """
    with as_usage_error(f"{run_dir} is not complete"):
        run, metrics = read_run_json(run_dir), last_evaluation(run_dir)
        metrics["eval_samples"]
    predictions, _ = load_predictions(run_dir / PREDICTIONS)
    examples: dict[str, torch.Tensor] = {}
    said = run["arguments"]
    if "pictures" in about and Path(said["dataset"]).exists():  # a Hub id would ask the network
        with contextlib.suppress(UsageError):
            data, *_ = load_images(
                said["dataset"], "test", about["size"], said["label"], about["classes"]
            )
            images, truth = data.tensors
            labels = truth.unique()[:MAX_EXAMPLES]
            first = [int((truth == label).nonzero()[0]) for label in labels]
            examples = {"inputs": images[first], "labels": labels}
    if "feature" in predictions:
        # As the card writes them: features come back from their standard units with an error.
        places = [5 - math.floor(math.log10(std)) for std in about["feature_std"]]
        pairs = zip(predictions["feature"][0].tolist(), places, strict=True)
        row = [round(value, num) + 0.0 for value, num in pairs]  # + 0.0: no -0
        examples["inputs"] = torch.tensor([row], dtype=torch.float64)
        examples["labels"] = predictions["target"][:1]
    return {"run": run, "metrics": metrics, "predictions": predictions, "examples": examples}


def write_hub(
    model: nn.Module, about: dict[str, Any], run_dir: Path, license: str | None = None
) -> Path:
    """Write RUN_DIR/hub/: weights, config.json, model.py, README.md, a page. Return the folder.

    model: what predict.load_run returns. license: of the weights, as the Hub abbreviates it.
    model.py is loaded once and must give the same outputs.
    Raises UsageError if it is of no script that this knows, or if the run is incomplete,
    RunFailure if the outputs differ.
    """
    if not about.keys() & {"pictures", "columns"}:
        raise UsageError(f"--export hub does not know the models of {about['script']}.py")
    folder = run_dir / "hub"
    known = describe_run(run_dir, about)
    examples = known["examples"] = known["examples"] or {"inputs": model.example_inputs()[:1]}
    source = Path(about.get("data", "")).name  # the name alone: not where it lies
    config = about | {"metrics": known["metrics"], "data": source}
    names = ("confusion.png", "fit.png", "curves.png", "model.onnx")
    copied = [name for name in names if (run_dir / name).exists()]
    weights = sha256_of(run_dir / "model.safetensors").encode()
    if "model.onnx" in copied and weights not in (run_dir / "model.onnx").read_bytes():
        raise UsageError(
            f"{run_dir / 'model.onnx'} was made of other weights: remove it, or --export onnx again"
        )
    card = _card(model, config, known, copied, run_dir.resolve().name, license)
    folder.mkdir(exist_ok=True)
    write_tensors(folder / "model.safetensors", model.model.state_dict(), config)
    write_tensors(folder / "examples.safetensors", examples, {})
    write_json(folder / "config.json", config)
    write_durably(folder / "model.py", _loader(model, about).encode())
    if "pictures" in about:
        Image.fromarray(examples["inputs"][0, 0].numpy()).save(folder / "example.png")
    for path in [*(run_dir / name for name in copied), ROOT / "LICENSE"]:
        shutil.copyfile(path, folder / path.name)
    _check(model, folder)
    write_durably(folder / "README.md", card.encode())
    write_space(folder)
    return folder


def push(folder: Path, repo: str) -> str:
    """Upload a folder to OWNER/NAME on the Hub, which is made if need be. Return its address.

    repo: a model; spaces/OWNER/NAME: a Gradio Space, which then runs the folder's app.py.
    """
    name = repo.removeprefix("spaces/")
    kind, sdk = ("space", "gradio") if name != repo else ("model", None)
    with as_usage_error(f"--push {repo}"):
        from huggingface_hub import HfApi

        api = HfApi()
        name = api.create_repo(name, repo_type=kind, space_sdk=sdk, exist_ok=True).repo_id
        card = folder / "README.md"
        card.write_text(card.read_text().replace("OWNER/NAME", name))
        address = api.upload_folder(
            repo_id=name,
            repo_type=kind,
            folder_path=folder,
            ignore_patterns="*.pyc",
            commit_message="Upload a trained model",
        )
        return str(address)


def _loader(model: nn.Module, about: dict[str, Any]) -> str:
    network = inspect.getsource(type(model.model))
    return LOADER.replace("WHOLE", CLASSIFIER if "pictures" in about else REGRESSOR).format(
        name=about["model"],
        imports="\n".join(IMPORTS[name] for name in IMPORTS if re.search(rf"\b{name}\b", network)),
        network=network,
        kind=type(model.model).__name__,
    )


@torch.inference_mode()
def _check(model: nn.Module, folder: Path) -> None:
    """Raise RunFailure unless model.py, by itself, gives the outputs of `model`."""
    path = folder / "model.py"
    torch.manual_seed(0)
    inputs = model.example_inputs()
    if not torch.equal(runpy.run_path(str(path))["load"]()(inputs), model(inputs)):
        raise RunFailure(f"{path} gives other outputs than this model")


def _card(
    model: nn.Module,
    about: dict[str, Any],
    known: dict[str, Any],
    copied: list[str],
    run_name: str,
    license: str | None,
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    last, run, classifier = about["metrics"], known["run"], "pictures" in about
    arguments = run["arguments"]
    source = Path(arguments.get("dataset") or arguments.get("data") or "synthetic")
    hub_id = str(source) if len(source.parts) == 2 and not source.exists() else None
    if source.parts[-2:] == ("data", "mnist"):
        hub_id = "ylecun/mnist"  # which the repository holds
    what = "pictures" if classifier else "rows"
    split = "training" if arguments.get("test_fraction") == 0 else "held-out"
    task = "image-classification" if classifier else "tabular-regression"
    metrics = ("accuracy",) if classifier else ("rmse", "mae", "r2")
    data, names = hub_id or source.name, about["classes" if classifier else "targets"]
    title = _one_line(f"{data}: {shorten(names, 5)} ({run_name})")
    metadata = ModelCardData(
        model_name=title,
        license=license,
        pipeline_tag=task,
        tags=["pytorch", "safetensors", "accelerate"],
        datasets=[hub_id] if hub_id else None,
        metrics=list(metrics),
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type=hub_id or "custom",
                dataset_name=source.name,
                metric_type=metric,
                metric_value=last[f"eval_{metric}"],
            )
            for metric in metrics
        ],
    )
    # Of a path from the root, the home folder or the parent only the name is published.
    words = [re.sub(r"^(.*=)?(/|~|\.\.|\w:).*[/\\]", r"\1", word) for word in run["command"]]
    values = {key[5:]: value for key, value in last.items() if key.startswith("eval_")}
    said = _examples(model, about, known["examples"], "model.onnx" in copied)
    limits = FOR_PICTURES if classifier else FOR_ROWS
    return CARD.format(
        metadata=metadata.to_yaml(),
        title=title,
        model=type(model.model).__name__,
        parameters=sum(weight.numel() for weight in model.parameters()),
        data=data,
        samples=values.pop("samples"),
        split=f"{split} {what}",
        seed=arguments["seed"],
        metrics="\n".join(f"| {name} | {value:.6g} |" for name, value in values.items()),
        command=_one_line(shlex.join(["python", *words])),
        hardware=f"{run['world']}; {run['machine']}",
        versions=", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        pictures="".join(f"![{Path(p).stem}]({p})\n" for p in copied if p.endswith(".png")),
        limits=limits.format(data=data, **said),
        license=license or "none was given",
        **said,
    )


@torch.inference_mode()
def _examples(
    model: nn.Module, about: dict[str, Any], examples: dict[str, torch.Tensor], onnx: bool
) -> dict[str, str]:
    """What the card says of its example: the code that asks the model, and what that prints."""
    inputs, labels = examples["inputs"], examples.get("labels")
    outputs = model(inputs)
    said = {"shape": f"{str(inputs.dtype)[6:]} (n, {', '.join(map(str, inputs.shape[1:]))})"}
    if "pictures" in about:
        answers = outputs.argmax(1).tolist()
        said |= {
            "look": about["pictures"]["read_as"],
            "names": _one_line(", ".join(about["classes"])),
            "threshold": f"{about['calibration']['threshold']:.2%}",
            "said": "outputs.argmax(1).tolist()",
            "answers": str(answers),
            "truth": "" if labels is None else f"; the truth: {labels.tolist()}",
        }
        answer = f"{about['classes'][answers[0]]} {outputs[0].max():.2%}"
        code, more = OF_PICTURES, OF_FILES.format(answer=answer)
    else:
        ranges = zip(about["features"], inputs[0].tolist(), about["feature_range"], strict=True)
        said |= {
            "row": "\n".join(
                f"    {json.dumps(name)}: {x:.15g},  # {low:.6g} to {high:.6g} in training"
                for name, x, (low, high) in ranges
            ),
            "names": _one_line(", ".join(about["targets"])),
            "said": '*[f"{value:,.6g}" for value in outputs[0]]',
            "answers": _numbers(outputs[0]),
            "truth": "" if labels is None else f"; the truth: {_numbers(labels[0])}",
        }
        code, more = OF_ROWS, ""
    return said | {"example": code.format(**said), "more": more + OF_ONNX.format(**said) * onnx}


def _numbers(row: torch.Tensor) -> str:
    return " ".join(f"{value:,.6g}" for value in row.tolist())


def _one_line(text: str) -> str:
    """The text for a comment of the card's code: a line break would end the comment."""
    return " ".join(text.split())
