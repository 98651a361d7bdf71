"""The exported folder is whole: its card parses, its program answers without this repository."""

import html
import importlib.metadata
import json
import re
import shutil
from pathlib import Path
from unittest import mock

import colours
import pytest
from conftest import NUM_TEST, ROOT, refused, rows
from huggingface_hub import HfApi, ModelCard
from PIL import Image

import predict
from trainkit.errors import RunFailure
from trainkit.tools import export

for name in export.PACKAGES:
    pytest.importorskip(name)


@pytest.fixture(scope="module")
def run_dir(mnist_run, tmp_path_factory):
    folder = shutil.copytree(mnist_run, tmp_path_factory.mktemp("runs") / "mnist")
    predict.main([str(folder), "--export", "--license", "mit"])
    return folder


@pytest.fixture(scope="module")
def table_dir(table_run, tmp_path_factory):
    folder = shutil.copytree(table_run, tmp_path_factory.mktemp("runs") / "houses")
    recorded = json.loads((folder / "run.json").read_text())  # main() was not started by a person
    recorded["command"] = ["train_regression.py", f"--data={table_run.parent}/houses.csv"]
    (folder / "run.json").write_text(json.dumps(recorded))
    predict.main([str(folder), "--export"])
    return folder


def test_the_card_says_what_was_measured_and_how_and_no_path_of_this_machine(
    run_dir, table_dir, tmp_path_factory
):
    for folder, task, license, said in (
        (run_dir, "image-classification", "mit", f"on {NUM_TEST} samples"),
        (table_dir, "tabular-regression", None, "--data=houses.csv`"),
    ):
        card = ModelCard.load(folder / "export" / "README.md")
        recorded, last = json.loads((folder / "run.json").read_text()), rows(folder, "epochs")[-1]
        facts = f"# {folder.name}\n", recorded["machine"], recorded["versions"]["torch"], said
        assert all(fact in card.text for fact in (*facts, license or "none was given"))
        found = {result.metric_type: result.metric_value for result in card.data.eval_results}
        known = {name[5:]: last[name] for name in last if name.startswith("eval_")}
        assert known == found | {"samples": known["samples"]} and len(found) > 1
        assert (card.data.pipeline_tag, card.data.model_name) == (task, folder.name)
        assert card.data.license == license
        content = b"".join(path.read_bytes() for path in (folder / "export").iterdir())
        for secret in (tmp_path_factory.getbasetemp(), ROOT):
            assert str(secret).encode() not in content


@pytest.fixture(scope="module")
def photo_dir(tmp_path_factory):
    folder = colours.make_run(tmp_path_factory.mktemp("runs") / "photos")
    predict.main([str(folder), "--script", colours.__file__, "--export"])
    return folder


STRANGER = """import contextlib, os, sys
os.chdir(folder)
sys.path[:] = [path for path in sys.path if path != root]
sys.modules.update(dict.fromkeys(hidden))
with open("said", "w") as file, contextlib.redirect_stdout(file):
    exec(piece, {})
"""


@pytest.fixture(scope="module")
def as_a_stranger(in_fresh_process):
    """Run code in a folder, without this repository and without torch; the lines it prints."""
    hidden = {*importlib.metadata.packages_distributions()} & {"torch", "safetensors", "datasets"}
    assert len(hidden) == 3

    def call(code: str, folder: Path) -> list[str]:
        in_fresh_process(STRANGER, folder=str(folder), root=str(ROOT), hidden=hidden, piece=code)
        return (folder / "said").read_text().splitlines()

    return call


def code_of(card: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return code


@pytest.mark.parametrize("kind", ["run_dir", "table_dir"])
def test_a_stranger_who_follows_the_card_gets_what_it_says(kind, request, tmp_path, as_a_stranger):
    folder = shutil.copytree(request.getfixturevalue(kind) / "export", tmp_path / "export")
    card = (folder / "README.md").read_text()
    (said,) = as_a_stranger(code_of(card), folder)
    (promised,) = re.findall("It prints: (.*)\n", card)
    for word, same in zip(said.split(), promised.split(), strict=True):  # 78.7179 and 78.718
        assert word == same or float(word) == pytest.approx(float(same), rel=1e-5)
    if kind == "run_dir":
        predictor = predict.load_run(request.getfixturevalue(kind))
        assert f"{said} " in predictor.predict_file(folder / "example.png") + " "


def test_the_card_reads_a_photo_as_predict_does_and_timm_gets_what_it_needs(
    photo_dir, tmp_path, as_a_stranger
):
    folder = shutil.copytree(photo_dir / "export", tmp_path / "export")
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "timm" and "pretrained=True" in card.text
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (photo_dir / "pretrained" / name).read_bytes()
    photo, code = colours.photograph(folder, "green", 0.2), code_of(card.text)
    with Image.open(photo) as picture:  # where it is transparent, a colour that nobody sees
        picture.putalpha(Image.new("L", picture.size, 255))
        picture.paste((255, 0, 0, 0), (0, 0, picture.width, 25))
        picture.save(photo)
    first, said = as_a_stranger(code + code.replace("example.png", photo.name), folder)
    assert f"It prints: {first}\n" in card.text
    predictor = predict.load_run(photo_dir, Path(colours.__file__))
    name, share = said.split(maxsplit=1)
    probability, number = predictor(predictor.read(photo)[0])[0].max(0)
    assert name == predictor.metadata["classes"][number] == "green"
    assert float(share.strip().rstrip("%")) == pytest.approx(100 * probability.item(), abs=0.5)


def test_a_push_uploads_the_folder_when_it_is_asked_for(run_dir, monkeypatch, capsys):
    api = mock.create_autospec(HfApi, instance=True)
    api.create_repo.return_value.repo_id = "someone/digits"
    api.upload_folder.return_value = "https://address"
    with refused("--push not a name!: "):
        predict.main([str(run_dir), "--export", "--push", "not a name!"])
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    predict.main([str(run_dir), "--export", "--push", "someone/digits"])
    assert capsys.readouterr().out.splitlines()[-1] == "https://address"
    api.create_repo.assert_called_once_with("someone/digits", exist_ok=True)
    sent = api.upload_folder.call_args.kwargs
    assert (sent["repo_id"], sent["folder_path"]) == ("someone/digits", run_dir / "export")
    with refused("--push needs --export"):
        predict.main([str(run_dir), "--push", "someone/digits"])


def test_an_export_that_cannot_be_made_is_one_sentence(run_dir, tmp_path, monkeypatch):
    for name, content, message in (
        ("export", "a file of somebody's", "cannot be exported: FileExistsError"),
        ("run.json", "{}", "is not complete: KeyError: 'command'"),
    ):
        copy = shutil.copytree(run_dir, tmp_path / name / "run")
        shutil.rmtree(copy / "export")
        (copy / name).write_text(content)
        with refused(message):
            predict.main([str(copy), "--export"])
        assert (copy / name).read_text() == content and not (copy / "export").is_dir()
    before = (run_dir / "export" / "model.onnx").read_bytes()
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    with pytest.raises(RunFailure, match="differ by"):
        predict.main([str(run_dir), "--export"])
    assert (run_dir / "export" / "model.onnx").read_bytes() == before
    monkeypatch.setattr(export, "PACKAGES", ("onnx", "no_such_package"))
    with refused(r"pip install no_such_package"):
        predict.main([str(run_dir), "--export"])


NAMES = [
    *("a|b", "<b>bold</b>", "<script>alert(1)</script>", "[x](javascript:alert(1))", "_a_ **b**"),
    *("`code`", "two\nlines", "# title", "- item", "1. one", "$x^2$", "&lt;", "~~gone~~", "a\\|b"),
    *("![x](http://a.b/c.png)", "===", "+ plus", "plain name", "caf\xe9"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_the_card_is_read_as_it_is_written(name):
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("strikethrough")
    markdown.enable("table")
    shown = " ".join(name.split())
    text = markdown.render(f"a line\n{export.escape(name)} and more\n")
    assert html.unescape(text) == f"<p>a line\n{shown} and more</p>\n"
    rendered = markdown.render(f"| a | b |\n| --- | --- |\n| {export.escape(name)} | x |\n")
    assert re.findall("<td>(.*)</td>", html.unescape(rendered)) == [shown, "x"]
    rendered = markdown.render(f"| a | b |\n| --- | --- |\n| {export.write_code(name)} | x |\n")
    code = re.findall("<td><code>(.*)</code></td>", html.unescape(rendered))
    assert code == [shown] or "\\|" in name
