"""The exported folder is whole: its program answers without this repository."""

import shutil
import sys
from unittest import mock

from trainkit import predict

import pytest
from conftest import ROOT, refused
from huggingface_hub import HfApi

from trainkit.errors import RunFailure
from trainkit.tools import export

for name in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(name)


@pytest.fixture(scope="module")
def run_dir(mnist_run, tmp_path_factory):
    folder = shutil.copytree(mnist_run, tmp_path_factory.mktemp("runs") / "mnist")
    predict.main([str(folder), "--export"])
    return folder


def test_the_folder_holds_no_path_of_this_machine(run_dir, tmp_path_factory):
    folder = run_dir / "export"
    assert {path.name for path in folder.iterdir()} >= {"model.onnx", "model.safetensors"}
    content = b"".join(path.read_bytes() for path in folder.iterdir())
    for secret in (tmp_path_factory.getbasetemp(), ROOT):
        assert str(secret).encode() not in content


STRANGER = """
import sys
sys.modules.update(dict.fromkeys(("torch", "safetensors", "datasets", "trainkit")))
import json
import numpy as np
from onnxruntime import InferenceSession
session = InferenceSession(f"{folder}/model.onnx")
classes = json.loads(session.get_modelmeta().custom_metadata_map["trainkit"])["classes"]
(outputs,) = session.run(["outputs"], {"inputs": np.array(inputs, np.uint8)})
assert classes[outputs[0].argmax()] == answer
"""


def test_the_program_answers_without_torch_and_this_repository(run_dir, in_fresh_process):
    predictor = predict.load_run(run_dir)
    inputs = predictor.example_inputs()[:1]
    answer = predictor.metadata["classes"][predictor(inputs)[0].argmax()]
    folder = str(run_dir / "export")
    in_fresh_process(STRANGER, folder=folder, inputs=inputs.tolist(), answer=answer)


def test_a_push_uploads_the_folder_when_it_is_asked_for(run_dir, monkeypatch, capsys):
    api = mock.create_autospec(HfApi, instance=True)
    api.create_repo.return_value.repo_id = "someone/digits"
    api.upload_folder.return_value = "https://address"
    monkeypatch.setattr(export, "write_export", lambda *run: run_dir / "export")
    with refused("--push not a name!: "):
        predict.main([str(run_dir), "--export", "--push", "not a name!"])
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    predict.main([str(run_dir), "--push", "someone/digits"])
    assert capsys.readouterr().out.splitlines()[-1] == "https://address"
    api.create_repo.assert_called_once_with("someone/digits", exist_ok=True)
    sent = api.upload_folder.call_args.kwargs
    assert (sent["repo_id"], sent["folder_path"]) == ("someone/digits", run_dir / "export")


def test_an_export_that_cannot_be_made_is_one_sentence(run_dir, tmp_path, monkeypatch):
    copy = shutil.copytree(run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("export"))
    (copy / "export").write_text("a file of somebody's")
    with refused("cannot be exported: FileExistsError"):
        predict.main([str(copy), "--export"])
    assert (copy / "export").read_text() == "a file of somebody's"
    before = (run_dir / "export" / "model.onnx").read_bytes()
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    with pytest.raises(RunFailure, match="differ by"):
        predict.main([str(run_dir), "--export"])
    assert (run_dir / "export" / "model.onnx").read_bytes() == before
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with refused("cannot be exported: .*onnxruntime"):
        predict.main([str(run_dir), "--export"])
