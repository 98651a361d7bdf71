"""The exported folder is whole: its card parses, its model loads without this repository."""

import base64
import contextlib
import http.server
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NUM_TEST, ROOT, rows, run, saved
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import predict
from modelkit import hub
from trainkit.errors import RunFailure, UsageError
from trainkit.folder.weights import write_tensors


@pytest.fixture(scope="module")
def run_dir(
    small_mnist: Path, tmp_path_factory: pytest.TempPathFactory, run_main: Callable
) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mnist"
    run_main(
        "train_mnist",
        "--dataset",
        small_mnist,
        "--run-dir",
        folder,
        "--batch-size",
        64,
        "--epochs",
        1,
        "--seed",
        3,
        "--pictures",
    )
    predict.main([str(folder), "--export", "hub"])
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
    run_main(
        "train_regression",
        "--run-dir",
        folder,
        "--epochs",
        2,
        "--model",
        "mlp",
        "--data",
        data,
        "--target",
        "price",
    )
    recorded = json.loads((folder / "run.json").read_text())  # main() was not started by a person
    recorded["command"] = ["train_regression.py", f"--data={data}", "--target", "price"]
    (folder / "run.json").write_text(json.dumps(recorded))
    predict.main([str(folder), "--export", "hub"])
    return folder


def test_the_card_has_valid_metadata_and_says_how_the_model_was_made(run_dir: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    card = huggingface_hub.ModelCard.load(run_dir / "hub" / "README.md")
    assert card.data.pipeline_tag == "image-classification"
    (result,) = card.data.eval_results
    last = rows(run_dir, "epochs")[-1]
    assert (result.metric_type, result.metric_value) == ("accuracy", last["eval_accuracy"])
    assert (result.dataset_type, result.dataset_name) == ("custom", "small_mnist0")
    assert card.data.to_dict()["model-index"][0]["name"] == (
        "small_mnist0: 0, 1, 2, 3, 4 and 5 more (mnist)"
    )
    assert card.data.datasets is None  # a folder is no data set of the Hub
    recorded = json.loads((run_dir / "run.json").read_text())
    for said in (
        " ".join(recorded["command"]),
        recorded["machine"],
        recorded["world"],
        "seed 3",
        f"on {NUM_TEST} held-out pictures",
        "(confusion.png)",
        "215,194",
        f"torch {recorded['versions']['torch']}",
    ):
        assert said in card.text, said
    assert card.data.license is None and "For the weights: none was given." in card.text
    for name, source in (("confusion.png", run_dir), ("LICENSE", ROOT)):
        assert (run_dir / "hub" / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((run_dir / "hub" / "config.json").read_text())["classes"] == [*"0123456789"]


def test_the_card_of_a_regression_and_of_the_shipped_data(
    regression_dir: Path, run_dir: Path
) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    card = huggingface_hub.ModelCard.load(regression_dir / "hub" / "README.md")
    assert card.data.pipeline_tag == "tabular-regression"
    last = rows(regression_dir, "epochs")[-1]
    found = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert found == {name: last[f"eval_{name}"] for name in ("rmse", "mae", "r2")}
    assert "--data=rooms.csv --target price" in card.text
    recorded = json.loads((run_dir / "run.json").read_text())
    before = (run_dir / "run.json").read_bytes()
    try:
        recorded["arguments"]["dataset"] = "/somewhere/data/mnist"
        (run_dir / "run.json").write_text(json.dumps(recorded))
        predict.main([str(run_dir), "--export", "hub", "--license", "mit"])
        card = huggingface_hub.ModelCard.load(run_dir / "hub" / "README.md")
        assert (card.data.datasets, card.data.license) == (["ylecun/mnist"], "mit")
    finally:
        (run_dir / "run.json").write_bytes(before)


def test_the_card_is_that_of_a_space_too(run_dir: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    said = huggingface_hub.SpaceCard.load(run_dir / "hub" / "README.md").data
    assert (said.sdk, said.app_file) == ("gradio", "app.py")
    assert re.fullmatch(r"3\.\d+", said.to_dict()["python_version"])
    needed = (run_dir / "hub" / "requirements.txt").read_text()
    for name in ("torch>=", "matplotlib>=", "gradio>=6.31", "pillow"):
        assert f"\n{name}" in f"\n{needed}", needed
    # Its own gradio is what requirements.txt asks for at least.
    assert said.to_dict()["sdk_version"] == "6.31.0"


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


@pytest.mark.parametrize("kind", ["run_dir", "regression_dir"])
def test_a_stranger_who_follows_the_card_gets_what_it_says(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Each piece of code runs with the packages named above it alone, and prints its last line."""
    folder = request.getfixturevalue(kind)
    with_onnx = [importlib.util.find_spec(name) for name in predict.ONNX_PACKAGES]
    if all(with_onnx):
        predict.main([str(folder), "--export", "onnx"])
    predict.main([str(folder), "--export", "hub"])
    shutil.copytree(folder / "hub", tmp_path / "hub")
    card = (tmp_path / "hub" / "README.md").read_text()
    found = re.findall(r"`pip install ([^`]*)`:\n\n```python\n(.*?)```", card, re.S)
    assert len(found) == card.count("```python") == (kind == "run_dir") + 1 + all(with_onnx)
    installed = importlib.metadata.packages_distributions()
    for packages, code in found:
        fine = allowed(packages.split())
        hidden = {
            module
            for module, names in installed.items()
            if not fine & {canonicalize_name(name) for name in names}
        }
        assert {"matplotlib", "gradio", "trackio"} & installed.keys() <= hidden
        hide = f"import sys; sys.modules.update(dict.fromkeys({sorted(hidden)!r}))\n"
        (tmp_path / "hub" / "use.py").write_text(hide + code)
        done = subprocess.run(
            [sys.executable, "use.py"],
            cwd=tmp_path / "hub",
            env={**os.environ, "PYTHONPATH": ""},
            text=True,
            capture_output=True,
        )
        expected = code.splitlines()[-1].split("  # ")[1].split("; the truth")[0]
        (said,) = done.stdout.splitlines()[-1:] or [done.stderr]
        if "onnx" in code and kind == "regression_dir":  # the last of six digits may differ
            assert float(said) == pytest.approx(float(expected), rel=1e-5)
        else:
            assert said == expected, (code, done.stderr)


def test_the_code_of_the_docs_asks_model_onnx_as_predict_does(
    run_dir: Path, tmp_path: Path
) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    predict.main([str(run_dir), "--export", "onnx"])
    (code,) = re.findall(
        r"```python\n([^`]*InferenceSession.*?)```",
        (ROOT / "docs" / "results.md").read_text(),
        re.S,
    )
    (tmp_path / "runs").mkdir()
    shutil.copytree(run_dir, tmp_path / "runs" / "mnist")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True
    )
    model, _ = predict.load_run(run_dir)
    with torch.inference_mode():
        said = model.predict_file(run_dir / "hub" / "example.png")
    assert done.stdout.strip() in said, done.stderr


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


def test_a_line_break_in_a_name_does_not_end_a_comment_of_the_card() -> None:
    about = {"features": ["floor\narea"], "targets": ["price\nin euro"], "feature_range": [[0, 1]]}
    said = hub._examples(torch.nn.Linear(1, 1), about, {"inputs": torch.ones(1, 1)}, onnx=False)
    assert '"floor\\narea": 1,' in said["example"] and "price in euro" in said["example"]


def test_no_path_of_this_machine_is_published(
    run_dir: Path, regression_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for folder in (run_dir, regression_dir):
        for path in (folder / "hub").rglob("*"):
            if path.is_file() and path.suffix != ".onnx":
                assert str(tmp_path_factory.getbasetemp()).encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_what_app_py_imports_is_in_the_folder(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir / "hub", tmp_path / "hub")
    result = subprocess.run(
        [sys.executable, "app.py", "absent"],
        cwd=tmp_path / "hub",
        text=True,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
    )
    assert result.returncode == 2 and "absent is not a finished run" in result.stderr
    for name in ("train_mnist.py", "predict.py", "trainkit/run.py", "modelkit/hub.py"):
        assert not (tmp_path / "hub" / name).exists()


def outside(folder: Path, tmp_path: Path, inputs: torch.Tensor) -> torch.Tensor:
    """What the model of an exported folder gives in a fresh process that knows no repository."""
    np.save(tmp_path / "inputs.npy", inputs.numpy())
    code = """import sys
import numpy, torch
from model import load
assert not any(name.split(".")[0] in ("trainkit", "predict", "accelerate", "train_mnist")
               for name in sys.modules)
with torch.no_grad():
    outputs = load()(torch.from_numpy(numpy.load(sys.argv[1])))
numpy.save(sys.argv[2], outputs.numpy())
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "inputs.npy", tmp_path / "outputs.npy"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(folder)},
        check=True,
        timeout=60,
    )
    return torch.from_numpy(np.load(tmp_path / "outputs.npy"))


def test_without_the_repository_the_model_gives_the_same_outputs(
    run_dir: Path, regression_dir: Path, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randint(0, 256, (20, 1, 28, 28), generator=generator, dtype=torch.uint8)
    features = torch.randn(20, 3, generator=generator)
    for folder, inputs in ((run_dir, pictures), (regression_dir, features)):
        model, _ = predict.load_run(folder)
        with torch.inference_mode():
            expected = model(inputs)
        moved = tmp_path / folder.name
        (folder / "hub").rename(moved)
        try:
            assert torch.equal(outside(moved, tmp_path, inputs), expected)
        finally:
            moved.rename(folder / "hub")
    assert len((run_dir / "hub" / "model.py").read_text().splitlines()) < 50


@pytest.mark.parametrize("name", ["compact", "lenet", "wide", "deep", "linear", "mlp"])
def test_every_model_of_the_scripts_can_stand_alone(name: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    import train_mnist
    import train_regression

    if name in train_mnist.MODELS:
        about = {
            "script": "train_mnist",
            "model": name,
            "classes": [*"abc"],
            "size": 28,
            "mean": train_mnist.MEAN,
            "std": train_mnist.STD,
            "pictures": {},
        }
        model = train_mnist.Predictor(about).eval()
    else:
        about = {
            "script": "train_regression",
            "model": name,
            "features": ["a", "b"],
            "targets": ["y"],
            "hidden": [4],
            "feature_mean": [0.0, 1],
            "feature_std": [1.0, 2],
            "target_mean": [5.0],
            "target_std": [3.0],
            "columns": [],
        }
        model = train_regression.Predictor(about).eval()
    save_file(model.model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "model.py").write_text(hub._loader(model, about))
    hub._check(model, tmp_path)
    with torch.no_grad():
        next(model.model.parameters()).add_(1)
    with pytest.raises(RunFailure, match="other outputs"):
        hub._check(model, tmp_path)
    source = (tmp_path / "model.py").read_text().replace("load_file(", "load_files(")
    (tmp_path / "model.py").write_text(source)
    with pytest.raises(NameError, match="load_files"):
        hub._check(model, tmp_path)


@pytest.fixture
def hub_server() -> Iterator[tuple[str, dict[str, Any]]]:
    """Speaks what an upload needs of the Hub; keeps what it was sent."""
    received: dict[str, Any] = {"files": {}, "tokens": set(), "created": [], "commits": []}

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def answer(self, content: dict | list) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            received["tokens"].add(self.headers.get("Authorization"))
            if self.path == "/api/repos/create":
                received["created"].append(json.loads(body))
                self.answer({"url": f"{address}/someone/digits", "id": "1"})
            elif self.path == "/api/validate-yaml":
                self.answer({"errors": [], "warnings": []})
            elif self.path.endswith("/preupload/main"):
                names = [file["path"] for file in json.loads(body)["files"]]
                self.answer(
                    {
                        "files": [
                            {"path": name, "uploadMode": "regular", "shouldIgnore": False}
                            for name in names
                        ]
                    }
                )
            elif self.path.endswith("s/someone/digits/commit/main"):
                received["commits"].append(self.path.split("/")[2])
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        content = base64.b64decode(line["value"]["content"])
                        received["files"][line["value"]["path"]] = content
                self.answer(
                    {
                        "commitUrl": f"{address}/someone/digits/commit/{'a' * 40}",
                        "commitOid": "a" * 40,
                        "success": True,
                    }
                )
            else:
                self.send_error(404)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield address, received
    server.shutdown()
    server.server_close()


def test_push_uploads_the_folder_and_only_when_asked(
    run_dir: Path, hub_server: tuple[str, dict[str, Any]]
) -> None:
    address, received = hub_server
    there = {
        "HF_ENDPOINT": address,
        "HF_TOKEN": "hf_of_a_test",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    exported = run("predict.py", run_dir, "--export", "hub", env=there)
    assert exported.returncode == 0 and not received["tokens"], exported.stderr
    pushed = run("predict.py", run_dir, "--export", "hub", "--push", "someone/digits", env=there)
    assert pushed.returncode == 0, pushed.stderr
    assert f"{address}/someone/digits" in pushed.stdout
    assert received["tokens"] == {"Bearer hf_of_a_test"}
    assert received["created"][0]["name"] == "digits" and received["commits"] == ["models"]
    folder = run_dir / "hub"
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert received["files"] == files
    assert b"hf download someone/digits" in files["README.md"]
    named = {"model.safetensors", "config.json", "model.py", "README.md", "app.py"}
    assert named | {"requirements.txt", "modelkit/page.py", "datakit/files.py"} < files.keys()


def test_a_space_is_pushed_as_one(
    run_dir: Path, hub_server: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    address, received = hub_server
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    folder = run_dir / "hub"
    (folder / "modelkit" / "__pycache__").mkdir()  # as `python app.py` leaves one
    try:
        (folder / "modelkit" / "__pycache__" / "page.pyc").write_bytes(b"")
        hub.push(folder, "spaces/someone/digits")
    finally:
        shutil.rmtree(folder / "modelkit" / "__pycache__")
    (made,) = received["created"]
    assert (made["name"], made["type"], made["sdk"]) == ("digits", "space", "gradio")
    assert received["commits"] == ["spaces"]
    assert {"app.py", "requirements.txt"} < received["files"].keys()
    assert not any("__pycache__" in name for name in received["files"])


def test_a_push_that_cannot_be_is_one_sentence(run_dir: Path) -> None:
    for flags, said in (
        (["--push", "someone/digits"], "--push goes with --export hub"),
        (["--export", "hub", "--push", "not a name!"], "--push not a name!: "),
        (["--export", "hub", "--push", "someone/digits"], "--push someone/digits: "),  # offline
    ):
        with pytest.raises(UsageError, match=said):
            predict.main([str(run_dir), *flags])


def test_a_run_without_evaluation_is_one_sentence(run_dir: Path) -> None:
    log = run_dir / "metrics.jsonl"
    before = log.read_bytes()
    try:
        log.write_bytes(b"")
        with pytest.raises(UsageError, match="is not complete"):
            predict.main([str(run_dir), "--export", "hub"])
    finally:
        log.write_bytes(before)


def test_an_export_that_cannot_be_made_is_one_sentence_and_nothing_half_written(
    regression_dir: Path, run_dir: Path, tmp_path: Path
) -> None:
    for number, (name, content, words) in enumerate(
        (
            ("hub", "a file of somebody's", "cannot be exported: FileExistsError"),
            ("run.json", "{}", "cannot be exported: KeyError: 'arguments'"),
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
    import app

    with pytest.raises(UsageError, match="export hub does not know the models of mine"):
        hub.write_hub(torch.nn.Identity(), {"script": "mine"}, tmp_path)
    monkeypatch.setattr(predict, "load_run", lambda path: (None, {"script": "mine"}))
    with pytest.raises(UsageError, match=r"no page for models of mine\.py"):
        app.main([str(run_dir)])
