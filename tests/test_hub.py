"""The exported folder is whole: its card parses, its model loads without this repository."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import NUM_TEST, ROOT, rows, saved
from huggingface_hub import HfApi, ModelCard
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import app
import predict
from trainkit.errors import RunFailure, UsageError
from trainkit.run_dir.weights import write_tensors
from trainkit.tools import hub

WITH_ONNX = all(importlib.util.find_spec(name) for name in predict.ONNX_PACKAGES)


@pytest.fixture(scope="module")
def run_dir(
    small_mnist: Path, tmp_path_factory: pytest.TempPathFactory, run_main: Callable
) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mnist"
    flags = "--batch-size 64 --epochs 1 --seed 3 --pictures --dataset"
    run_main("train_mnist", *flags.split(), small_mnist, "--run-dir", folder)
    for kind in ("onnx", "hub")[not WITH_ONNX :]:
        predict.main([str(folder), "--export", kind])
    return folder


@pytest.fixture(scope="module")
def regression_dir(tmp_path_factory: pytest.TempPathFactory, run_main: Callable) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "regression"
    table = [
        f"{area},{city},{area * 3 + 100 * (city == 'Rome')}"
        for area in range(20, 220)
        for city in ("Bonn", "Rome")
    ]
    data = tmp_path_factory.mktemp("private") / "rooms.csv"
    data.write_text("\n".join(["area,city,price", *table]))
    flags = "--epochs 2 --model mlp --target price --data"
    run_main("train_regression", *flags.split(), data, "--run-dir", folder)
    recorded = json.loads((folder / "run.json").read_text())  # main() was not started by a person
    recorded["command"] = ["train_regression.py", f"--data={data}", "--target", "price"]
    (folder / "run.json").write_text(json.dumps(recorded))
    predict.main([str(folder), "--export", "hub"])
    return folder


def test_the_card_has_valid_metadata_and_says_how_the_model_was_made(run_dir: Path) -> None:
    card = ModelCard.load(run_dir / "hub" / "README.md")
    recorded = json.loads((run_dir / "run.json").read_text())
    for said in (
        " ".join(recorded["command"]),
        recorded["machine"],
        "seed 3",
        f"on {NUM_TEST} held-out pictures",
        "(confusion.png)",
        f"torch {recorded['versions']['torch']}",
        "For the weights: none was given.",
    ):
        assert said in card.text, said
    (result,) = card.data.eval_results
    assert (result.metric_type, result.dataset_name) == ("accuracy", "small_mnist0")
    assert result.metric_value == rows(run_dir, "epochs")[-1]["eval_accuracy"]
    metadata = card.data.to_dict()
    assert metadata["model-index"][0]["name"] == "small_mnist0: 0, 1, 2, 3, 4 and 5 more (mnist)"
    # A folder is no data set of the Hub; the card is that of a Gradio Space too.
    assert not {"datasets", "license"} & metadata.keys()
    names = ("pipeline_tag", "sdk", "app_file")
    expected = ["image-classification", "gradio", "app.py"]
    assert [metadata[name] for name in names] == expected
    needed = (run_dir / "hub" / "requirements.txt").read_text().splitlines()
    assert f"gradio>={metadata['sdk_version'].rpartition('.')[0]}" in needed
    names = {re.split("[<>=]", line)[0] for line in needed}
    assert {"torch", "matplotlib", "pillow"} < names and not {"datasets", "evaluate"} & names
    assert not any((run_dir / "hub" / name).exists() for name in ("predict.py", "trainkit/run.py"))


def test_the_card_of_a_regression_and_of_the_shipped_data(
    regression_dir: Path, run_dir: Path, tmp_path: Path
) -> None:
    card = ModelCard.load(regression_dir / "hub" / "README.md")
    last = rows(regression_dir, "epochs")[-1]
    found = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert found == {name: last[f"eval_{name}"] for name in ("rmse", "mae", "r2")}
    assert "--data=rooms.csv --target price" in card.text
    shutil.copytree(run_dir, tmp_path / "run")
    text = (run_dir / "run.json").read_text()
    dataset = json.loads(text)["arguments"]["dataset"]
    (tmp_path / "run" / "run.json").write_text(text.replace(dataset, "/somewhere/data/mnist"))
    predict.main([str(tmp_path / "run"), "--export", "hub", "--license", "mit"])
    card = ModelCard.load(tmp_path / "run" / "hub" / "README.md")
    assert (card.data.datasets, card.data.license) == (["ylecun/mnist"], "mit")


def allowed(packages: Iterable[str]) -> set[str]:
    """The names of what pip installs with these packages."""
    found, waiting = set(), [*packages]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            wanted = map(Requirement, importlib.metadata.requires(name) or [])
            waiting += [need.name for need in wanted if not need.marker or need.marker.evaluate()]
    return found


STRANGER = """import contextlib, os, sys
os.chdir(folder)
sys.path[:] = [folder, *(path for path in sys.path if path != root)]
sys.modules.update(dict.fromkeys(hidden))
with open("said", "w") as file, contextlib.redirect_stdout(file):
    exec(piece, {})
"""


@pytest.mark.parametrize("kind", ["run_dir", "regression_dir"])
def test_a_stranger_who_follows_the_card_gets_what_it_says(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, in_fresh_process: Callable
) -> None:
    """Each piece of code runs with the packages named above it alone, and prints its last line."""
    folder = shutil.copytree(request.getfixturevalue(kind) / "hub", tmp_path / "hub")
    card = (folder / "README.md").read_text()
    found = re.findall(r"`pip install ([^`]*)`:\n\n```python\n(.*?)```", card, re.S)
    assert len(found) == card.count("```python") == (2 + WITH_ONNX if kind == "run_dir" else 1)
    installed = importlib.metadata.packages_distributions()
    for packages, code in found:
        fine = allowed(packages.split())
        hidden = {
            module
            for module, names in installed.items()
            if not fine & {canonicalize_name(name) for name in names}
        }
        assert {"matplotlib", "datasets"} <= hidden
        names = {"folder": str(folder), "root": str(ROOT), "hidden": hidden}
        in_fresh_process(STRANGER, piece=code, **names)
        expected = code.splitlines()[-1].split("  # ")[1].split("; the truth")[0]
        assert (folder / "said").read_text().splitlines()[-1] == expected, code


@pytest.mark.skipif(not WITH_ONNX, reason="needs the packages of --export onnx")
def test_the_code_of_the_docs_asks_model_onnx_as_predict_does(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    docs = (ROOT / "docs" / "results.md").read_text()
    (code,) = re.findall(r"```python\n([^`]*InferenceSession.*?)```", docs, re.S)
    shutil.copytree(run_dir, tmp_path / "runs" / "mnist")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(code, {})
    said = capsys.readouterr().out.strip()
    predict.main(["runs/mnist", "runs/mnist/hub/example.png"])
    assert said and said in capsys.readouterr().out


def test_a_row_of_the_card_is_an_evaluated_one_with_its_columns(
    regression_dir: Path, tmp_path: Path
) -> None:
    tensors, metadata = saved(regression_dir, "predictions")
    features = tensors["feature"].clone()
    features[0] = torch.tensor([190.0000003, -1e-9, 1])
    shutil.copytree(regression_dir, tmp_path / "run")
    path = tmp_path / "run" / "predictions.safetensors"
    write_tensors(path, {**tensors, "feature": features}, metadata)
    predict.main([str(tmp_path / "run"), "--export", "hub"])
    card = (tmp_path / "run" / "hub" / "README.md").read_text()
    row = (
        r'\n    "area": 190,  # \d+ to \d+ in training\n    "city=Bonn": 0,.*\n    "city=Rome": 1,'
    )
    assert re.search(row, card)
    assert f"; the truth: {tensors['target'][0].item():,.6g}" in card


def test_no_path_of_this_machine_is_published(
    run_dir: Path, regression_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for folder in (run_dir, regression_dir):
        for path in (folder / "hub").rglob("*.*"):
            secret = str(tmp_path_factory.getbasetemp()).encode()
            assert path.suffix == ".onnx" or secret not in path.read_bytes(), path


# What a run says of its model, by script.
ABOUT = {
    "train_mnist": {"classes": [*"abc"], "size": 28, "mean": 0.1307, "std": 0.3081, "pictures": {}},
    "train_regression": {
        **{"features": [*"ab"], "targets": ["y"], "hidden": [4], "columns": []},
        **{"feature_mean": [0.0, 1], "feature_std": [1.0, 2]},
        **{"target_mean": [5.0], "target_std": [3.0]},
    },
}


@pytest.mark.parametrize("script", ABOUT)
def test_every_model_of_the_scripts_can_stand_alone(script: str, tmp_path: Path) -> None:
    module = importlib.import_module(script)
    for name in module.MODELS:
        about = {"script": script, "model": name, **ABOUT[script]}
        model = module.Predictor(about).eval()
        write_tensors(tmp_path / "model.safetensors", model.model.state_dict(), {})
        (tmp_path / "config.json").write_text(json.dumps(about))
        (tmp_path / "model.py").write_text(hub._loader(model, about))
        hub._check(model, tmp_path)
        with torch.no_grad():
            next(model.model.parameters()).add_(1)
        with pytest.raises(RunFailure, match="other outputs"):
            hub._check(model, tmp_path)


@pytest.mark.parametrize(
    ("repo", "kind", "sdk"),
    [("someone/digits", "model", None), ("spaces/someone/digits", "space", "gradio")],
)
def test_a_push_uploads_the_folder_as_what_was_asked(
    repo: str,
    kind: str,
    sdk: str | None,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    api = mock.create_autospec(HfApi, instance=True)
    api.create_repo.return_value.repo_id = "someone/digits"
    api.upload_folder.return_value = "https://address"
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    predict.main([str(run_dir), "--export", "hub"])
    assert not api.mock_calls  # only when asked
    predict.main([str(run_dir), "--export", "hub", "--push", repo])
    assert capsys.readouterr().out.splitlines()[-1] == "https://address"
    api.create_repo.assert_called_once_with(
        "someone/digits", repo_type=kind, space_sdk=sdk, exist_ok=True
    )
    sent = api.upload_folder.call_args.kwargs
    assert (sent["repo_id"], sent["repo_type"]) == ("someone/digits", kind)
    assert sent["folder_path"] == run_dir / "hub" and sent["ignore_patterns"] == "*.pyc"
    assert "hf download someone/digits" in (run_dir / "hub" / "README.md").read_text()


def test_a_push_that_cannot_be_is_one_sentence(run_dir: Path) -> None:
    for flags, said in (
        (["--push", "someone/digits"], "--push goes with --export hub"),
        (["--export", "hub", "--push", "not a name!"], "--push not a name!: "),
        (["--export", "hub", "--push", "someone/digits"], "--push someone/digits: "),  # offline
    ):
        with pytest.raises(UsageError, match=said):
            predict.main([str(run_dir), *flags])


def test_an_export_that_cannot_be_made_is_one_sentence_and_nothing_half_written(
    regression_dir: Path, run_dir: Path, tmp_path: Path
) -> None:
    for number, (name, content, words) in enumerate(
        (
            ("hub", "a file of somebody's", "cannot be exported: FileExistsError"),
            ("run.json", "{}", "cannot be exported: KeyError: 'arguments'"),
            ("metrics.jsonl", "", "is not complete"),
            ("metrics.jsonl", (run_dir / "metrics.jsonl").read_text(), "KeyError: 'eval_rmse'"),
            ("model.onnx", "of other weights", "model.onnx was made of other weights: remove it"),
        )
    ):
        copy = tmp_path / str(number)
        shutil.copytree(regression_dir, copy, ignore=shutil.ignore_patterns("hub"))
        (copy / name).write_text(content)
        with pytest.raises(UsageError, match=words):
            predict.main([str(copy), "--export", "hub"])
        assert (copy / name).read_text() == content and not (copy / "hub").is_dir()


def test_a_model_of_another_script_is_one_sentence(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="export hub does not know the models of mine"):
        hub.write_hub(torch.nn.Identity(), {"script": "mine"}, tmp_path)
    monkeypatch.setattr(predict, "load_run", lambda path: (None, {"script": "mine"}))
    with pytest.raises(UsageError, match=r"no page for models of mine\.py"):
        app.main([str(run_dir)])
