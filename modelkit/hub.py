"""A finished run as a folder for the Hugging Face Hub, and the way there.

Whoever has the folder needs neither this repository nor more than torch and safetensors; for the
page, app.py, what requirements.txt names.
"""

import contextlib
import inspect
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

from datakit.pictures import load_images
from modelkit.photos import read_picture
from modelkit.space import ROOT, needed_by, write_space
from trainkit.errors import RunFailure, UsageError, as_usage_error
from trainkit.manifest import sha256_of
from trainkit.records import PREDICTIONS, last_evaluation, load_predictions, read_run_json
from trainkit.rundir import refuse_links, write_durably, write_json, write_tensors

MAX_EXAMPLES = 20  # test pictures, one of a class
# What the source of a model may use.
IMPORTS = {
    "math": "import math",
    "Sequence": "from collections.abc import Sequence",
    "pairwise": "from itertools import pairwise",
    "F": "import torch.nn.functional as F",
    "Dropout": "from torch.nn import Dropout",  # for trainkit.order's: in use both do nothing
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

# {name}

{model}, {parameters:,} parameters, trained on {data} with plain PyTorch and Accelerate.

| measured on {samples:,} {split} samples, seed {seed} | |
| --- | --- |
{metrics}

| made by | |
| --- | --- |
| command | `{command}` |
| hardware | {hardware} |
| versions | {versions} |

{pictures}
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

Apache-2.0 (LICENSE) for the code in this folder and, unless its owner says otherwise, the weights.
The data keep their own.
"""
OF_PICTURES = """from safetensors.torch import load_file
from model import load

inputs = load_file("examples.safetensors")["inputs"]  # {shape}: {look}
outputs = load()(inputs)  # probabilities of {classes}
print({said})  # {answers}{truth}"""
OF_ROWS = """import torch
from model import load

row = [  # column=text: 1 where the column holds the text, else 0
{row}
]
outputs = load()(torch.tensor([row], dtype=torch.float64))  # {shape} to {classes}
print({said})  # {answers}{truth}"""
OF_FILES = """
A picture file (PNG, JPEG, ...) of any size, brought to what the network knows as predict.py does
it, with `pip install {packages}`:

```python
import json
from pathlib import Path
from model import load
from {module} import read_picture

config = json.loads(Path("config.json").read_text())
picture = read_picture(Path("example.png"), config["size"], config["pictures"])
probabilities = load()(picture)[0]
print(config["classes"][probabilities.argmax()], f"{{probabilities.max():.1%}}")  # {answer}
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
    gone; the first evaluated row, or the means of the features where no row is saved.
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
    if "columns" in about:
        row, rows = about["feature_mean"], predictions.get("feature", torch.empty(0, 0))
        if rows.shape[1] == len(row):
            row, examples["labels"] = rows[0].tolist(), predictions["target"][:1]
        # As the card writes them: features come back from their standard units with an error.
        places = [5 - math.floor(math.log10(std)) for std in about["feature_std"]]
        row = [round(value, num) for value, num in zip(row, places, strict=True)]
        examples["inputs"] = torch.tensor([row], dtype=torch.float64)
    return {"run": run, "metrics": metrics, "predictions": predictions, "examples": examples}


def write_hub(model: nn.Module, about: dict[str, Any], run_dir: Path) -> Path:
    """Write RUN_DIR/hub/: weights, config.json, model.py, README.md, a page. Return the folder.

    model: what predict.load_run returns. model.py is loaded once and must give the same outputs.
    Raises UsageError if it is of no script that this knows, or if the run is incomplete,
    RunFailure if the outputs differ.
    """
    if not about.keys() & {"pictures", "columns"}:
        raise UsageError(f"--export hub does not know the models of {about['script']}.py")
    folder = run_dir / "hub"
    refuse_links([folder, *folder.rglob("*")])
    known = describe_run(run_dir, about)
    examples = known["examples"] or {"inputs": model.example_inputs()[:1]}
    source = Path(about.get("data", "")).name  # the name alone: not where it lies
    config = about | {"metrics": known["metrics"], "data": source}
    names = ("confusion.png", "fit.png", "curves.png", "model.onnx")
    copied = [name for name in names if (run_dir / name).exists()]
    weights = sha256_of(run_dir / "model.safetensors").encode()
    if "model.onnx" in copied and weights not in (run_dir / "model.onnx").read_bytes():
        raise UsageError(
            f"{run_dir / 'model.onnx'} was made of other weights: remove it, or --export onnx again"
        )
    card = _card(model, config, known["run"], examples, copied)
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
    try:
        same = torch.equal(runpy.run_path(str(path))["load"]()(inputs), model(inputs))
    except (NameError, TypeError, KeyError, RuntimeError) as problem:
        raise RunFailure(f"{path} cannot stand alone: {problem}") from problem
    if not same:
        raise RunFailure(f"{path} gives other outputs than this model")


def _card(
    model: nn.Module,
    about: dict[str, Any],
    run: dict[str, Any],
    examples: dict[str, torch.Tensor],
    copied: list[str],
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    last, classifier = about["metrics"], "pictures" in about
    arguments, name = run["arguments"], f"{about['script'].removeprefix('train_')}-{about['model']}"
    source = Path(arguments.get("dataset") or arguments.get("data") or "synthetic")
    hub_id = str(source) if len(source.parts) == 2 and not source.exists() else None
    if source.parts[-2:] == ("data", "mnist"):
        hub_id = "ylecun/mnist"  # which the repository holds
    held_out = arguments.get("validation_split") or arguments.get("test_fraction") == 0
    split = "training" if held_out else "test"
    task = "image-classification" if classifier else "tabular-regression"
    metrics = ("accuracy",) if classifier else ("rmse", "mae", "r2")
    data = ModelCardData(
        model_name=name,
        license="apache-2.0",
        pipeline_tag=task,
        tags=["pytorch", "safetensors", "accelerate"],
        datasets=[hub_id] if hub_id else None,
        metrics=list(metrics),
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type=hub_id or source.name,
                dataset_name=source.name,
                dataset_split=split,
                metric_type=metric,
                metric_value=last[f"eval_{metric}"],
            )
            for metric in metrics
        ],
    )
    # Of a path from the root, the home folder or the parent only the name is published.
    words = [re.sub(r"^(.*=)?(/|~|\.\.|\w:).*[/\\]", r"\1", word) for word in run["command"]]
    values = {key: value for key, value in last.items() if key.startswith("eval_")}
    samples = values.pop("eval_samples")
    example, more = _examples(model, about, examples, "model.onnx" in copied)
    return CARD.format(
        metadata=data.to_yaml(),
        name=name,
        model=type(model.model).__name__,
        parameters=sum(weight.numel() for weight in model.parameters()),
        data=hub_id or source.name,
        samples=samples,
        split=split,
        seed=arguments["seed"],
        metrics="\n".join(f"| {k.removeprefix('eval_')} | {v:.6g} |" for k, v in values.items()),
        command=_one_line(shlex.join(["python", *words])),
        hardware=f"{run['world']}; {run['machine']}",
        versions=", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        pictures="".join(f"![{Path(p).stem}]({p})\n" for p in copied if p.endswith(".png")),
        example=example,
        more=more,
    )


@torch.inference_mode()
def _examples(
    model: nn.Module, about: dict[str, Any], examples: dict[str, torch.Tensor], onnx: bool
) -> tuple[str, str]:
    """Code for the card that asks the model, with what it prints; and what else can be done."""
    inputs, more = examples["inputs"], ""
    outputs = model(inputs)
    said: dict[str, Any] = {
        "shape": f"{str(inputs.dtype)[6:]} (n, {', '.join(map(str, inputs.shape[1:]))})",
        "truth": f"; the truth: {examples['labels'].tolist()}" if "labels" in examples else "",
    }
    if "pictures" in about:
        answers = outputs.argmax(1).tolist()
        said |= {
            "look": about["pictures"]["read_as"],
            "classes": _one_line(", ".join(about["classes"])),
            "said": "outputs.argmax(1).tolist()",
            "answers": answers,
        }
        code = OF_PICTURES.format(**said)
        module = read_picture.__module__
        packages = {*needed_by(f"{module.replace('.', '/')}.py")[1], "safetensors"}
        answer = f"{about['classes'][answers[0]]} {outputs[0].max():.1%}"
        more = OF_FILES.format(packages=" ".join(sorted(packages)), module=module, answer=answer)
    else:
        pairs = zip(inputs[0].tolist(), about["features"], strict=True)
        said |= {
            "row": "\n".join(f"    {x:.15g},  # {_one_line(name)}" for x, name in pairs),
            "classes": _one_line(", ".join(about["targets"])),
            "said": '[f"{value:,.4g}" for value in outputs[0]]',
            "answers": [f"{value:,.4g}" for value in outputs[0]],
        }
        code = OF_ROWS.format(**said)
    return code, more + OF_ONNX.format(**said) * onnx


def _one_line(text: str) -> str:
    """The text for a comment of the card's code: a line break would end the comment."""
    return " ".join(text.split())
