"""A finished run as a folder for the Hugging Face Hub, and the way there.

Whoever has the folder needs neither this repository nor more than torch and safetensors; for the
page, app.py, what requirements.txt names.
"""

import importlib.util
import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelkit.space import space_metadata, write_space
from trainkit.compare import last_row
from trainkit.errors import RunFailure, UsageError, as_usage_error
from trainkit.rundir import refuse_links, write_durably, write_json

# What the source of a model may use.
IMPORTS = {
    "math": "import math",
    "Sequence": "from collections.abc import Sequence",
    "pairwise": "from itertools import pairwise",
    "Any": "from typing import Any",
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

{whole}

def load(folder=Path(__file__).parent):
    """The trained model, ready to use: {promise}"""
    config = json.loads((Path(folder) / "config.json").read_text())
    network = {call}
    network.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return {wrapper}(network, config).eval()
'''
CARD = """
# {name}

{model}, {parameters:,} parameters, trained on {data} with plain PyTorch and Accelerate.

| measured on {samples:,} {split} samples, seed {seed} | |
| --- | --- |
{metrics}

| made by | |
| --- | --- |
| command | `{command}` |
| hardware | {world}; {machine} |
| versions | {versions} |

{pictures}
## Use

`model.py` needs torch and safetensors, nothing else:

```python
from huggingface_hub import snapshot_download
import sys, torch

folder = snapshot_download("OWNER/NAME")
sys.path.insert(0, folder)
from model import load

model = load()
{example}
```

`pip install -r requirements.txt && python app.py` opens a page in the browser that asks the
model. The folder is a Gradio Space as it is.
"""


class Classifier(nn.Module):
    """Grey values 0 to 255, uint8 (n, 1, size, size), to the probabilities of the classes."""

    def __init__(self, model: nn.Module, about: dict[str, Any]):
        super().__init__()
        self.model, self.mean, self.std = model, about["mean"], about["std"]
        self.temperature = about.get("calibration", {}).get("temperature", 1.0)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images.float().sub(255 * self.mean).mul(1 / (255 * self.std))
        outputs = self.model(images.contiguous(memory_format=torch.channels_last))
        return (outputs / self.temperature).softmax(1)


class Regressor(nn.Module):
    """Features in their own units, (n, features), to targets in theirs."""

    def __init__(self, model: nn.Module, about: dict[str, Any]):
        super().__init__()
        self.model = model
        for name in ("feature_mean", "feature_std", "target_mean", "target_std"):
            self.register_buffer(name, torch.tensor(about[name], dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.model(((inputs - self.feature_mean) / self.feature_std).float())
        return (outputs * self.target_std + self.target_mean).to(inputs.dtype)


def write_hub(model: nn.Module, about: dict[str, Any], run_dir: Path) -> Path:
    """Write RUN_DIR/hub/: weights, config.json, model.py, README.md, a page. Return the folder.

    model: what predict.load_run returns. model.py is loaded once and must give the same outputs.
    Raises UsageError if it is of no script that this knows, or if the run or a package is
    incomplete, RunFailure if the outputs differ.
    """
    if not about.keys() & {"pictures", "columns"}:
        raise UsageError(f"--export hub does not know the models of {about['script']}.py")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UsageError("--export hub needs the package huggingface_hub, not installed "
                                "here: pip install huggingface_hub")  # fmt: skip
    folder = run_dir / "hub"
    refuse_links([folder, *folder.rglob("*")])
    folder.mkdir(exist_ok=True)
    shutil.copyfile(run_dir / "model.safetensors", folder / "model.safetensors")
    write_json(folder / "config.json", about)
    write_durably(folder / "model.py", _loader(model, about).encode())
    names = ("confusion.png", "fit.png", "curves.png")
    pictures = [name for name in names if (run_dir / name).exists()]
    for name in pictures:
        shutil.copyfile(run_dir / name, folder / name)
    _check(model, about, folder)
    card = _card(model, about, run_dir, pictures)
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
        return str(api.upload_folder(repo_id=name, repo_type=kind, folder_path=folder,
                                     ignore_patterns="*.pyc",
                                     commit_message="Upload a trained model"))  # fmt: skip


def _loader(model: nn.Module, about: dict[str, Any]) -> str:
    wrapper = Classifier if "pictures" in about else Regressor
    network, whole = (inspect.getsource(kind) for kind in (type(model.model), wrapper))
    used = [line for name, line in IMPORTS.items() if re.search(rf"\b{name}\b", network + whole)]
    if "pictures" in about:
        call = 'len(config["classes"])'
        promise = "uint8 (n, 1, size, size), white on black, to probabilities."
    else:
        call = 'len(config["features"]), len(config["targets"]), config["hidden"]'
        promise = "float32 (n, features), in their units, to targets in theirs."
    return LOADER.format(
        name=about["model"], imports="\n".join(used), network=network, whole=whole, promise=promise,
        call=f"{type(model.model).__name__}({call})", wrapper=wrapper.__name__,
    )  # fmt: skip


@torch.inference_mode()
def _check(model: nn.Module, about: dict[str, Any], folder: Path) -> None:
    """Raise RunFailure unless model.py, by itself, gives the outputs of `model`."""
    spec = importlib.util.spec_from_file_location("exported_model", folder / "model.py")
    assert spec is not None and spec.loader is not None  # of a .py file it never is
    module = importlib.util.module_from_spec(spec)
    torch.manual_seed(0)
    inputs = model.example_inputs()
    try:
        spec.loader.exec_module(module)
        same = torch.equal(module.load()(inputs), model(inputs))
    except (NameError, TypeError, KeyError, RuntimeError) as problem:
        raise RunFailure(f"{folder / 'model.py'} cannot stand alone: {problem}") from problem
    if not same:
        raise RunFailure(f"{folder / 'model.py'} gives other outputs than this model")


def _card(model: nn.Module, about: dict[str, Any], run_dir: Path, pictures: list[str]) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    with as_usage_error(f"{run_dir} is not complete"):
        run = json.loads((run_dir / "run.json").read_text())
        last = last_row(run_dir)
        samples = last["eval_samples"]
    arguments, name = run["arguments"], f"{about['script'].removeprefix('train_')}-{about['model']}"
    source = Path(arguments.get("dataset") or arguments.get("data") or "synthetic")
    shipped = source.parts[-2:] == ("data", "mnist")
    hub_id = "ylecun/mnist" if shipped else str(source) if len(source.parts) == 2 else None
    hub_id = hub_id if shipped or not source.exists() else None
    held_out = arguments.get("validation_split") or arguments.get("test_fraction") == 0
    split = "training" if held_out else "test"
    classifier = "pictures" in about
    task = "image-classification" if classifier else "tabular-regression"
    metrics = ("accuracy",) if classifier else ("rmse", "mae", "r2")
    data = ModelCardData(
        model_name=name, pipeline_tag=task, tags=["pytorch", "safetensors", "accelerate"],
        datasets=[hub_id] if hub_id else None, metrics=list(metrics),
        eval_results=[
            EvalResult(task_type=task, dataset_type=hub_id or source.name, dataset_name=source.name,
                       dataset_split=split, metric_type=metric,
                       metric_value=last[f"eval_{metric}"])
            for metric in metrics
        ],
        **space_metadata(),
    )  # fmt: skip
    shape = f"(1, 1, {about.get('size')}, {about.get('size')}), dtype=torch.uint8"
    body = CARD.format(
        name=name, model=type(model.model).__name__, data=hub_id or source.name, split=split,
        samples=samples, parameters=sum(weight.numel() for weight in model.parameters()),
        seed=arguments["seed"], command=" ".join(["python", *run["command"]]), world=run["world"],
        machine=run["machine"], pictures="".join(f"![{Path(p).stem}]({p})\n" for p in pictures),
        versions=", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        metrics="\n".join(f"| {key.removeprefix('eval_')} | {value:.6g} |" for key, value in
                          last.items() if key.startswith("eval_") and key != "eval_samples"),
        example=f"print(model(torch.zeros({shape})))  # probabilities of config.json's classes"
        if classifier else f"print(model(torch.zeros(1, {len(about['features'])})))",
    )  # fmt: skip
    return f"---\n{data.to_yaml()}\n---\n{body}"
