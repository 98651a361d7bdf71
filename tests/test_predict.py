"""A run folder alone is enough to use its model, and a wrong file is one sentence."""

import io
import shutil
from pathlib import Path

import colours
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from conftest import NUM_TEST, posix_only, rows, saved
from PIL import Image

import predict
from trainkit.errors import UsageError
from trainkit.run_dir import records
from trainkit.run_dir.weights import write_tensors
from trainkit.tools.photos import read_photo


@pytest.fixture(scope="module")
def pictures(small_mnist):
    table = pq.read_table(small_mnist / "test-00000-of-00001.parquet").to_pydict()
    images = [Image.open(io.BytesIO(image["bytes"])) for image in table["image"]]
    return list(zip(images, table["label"], strict=True))


def test_a_digit_is_read_in_either_polarity_and_from_a_corner_of_a_page(
    mnist_run, pictures, tmp_path, capsys
):
    predictor = predict.load_run(mnist_run)
    paths = [tmp_path / name for name in ("same.png", "negative.png", "print.tiff")]
    right = []
    for digit, label in pictures[:10]:
        negative = Image.eval(digit, lambda value: 255 - value)
        page = Image.new("RGB", (400, 300), "white")
        page.paste(negative.resize((140, 140)), (30, 120))
        forms = digit, negative, page.convert("CMYK")
        for picture, path in zip(forms, paths, strict=True):
            picture.save(path)
        (probability, prediction), *others = (classify(predictor, path) for path in paths)
        if prediction == label and probability > 0.9:  # else it proves nothing about the files
            right.append([other == label for _, other in others])
    negatives, pages = map(sum, zip(*right, strict=True))
    assert negatives == len(right) > 5 and pages >= len(right) - 1
    capsys.readouterr()
    predict.main([str(mnist_run), str(paths[0]), str(paths[2])])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{paths[0]}: {prediction} {probability:.2%}  (then ")
    assert second.startswith(f"{paths[2]}: ")


def classify(predictor: predict.PicturePredictor, path: Path) -> tuple[float, int]:
    with torch.inference_mode():
        best = predictor(read_photo(path, 28, predictor.framing)[0])[0].max(0)
    return best.values.item(), best.indices.item()


def test_predictions_are_those_of_the_last_evaluation(mnist_run, pictures):
    model = predict.load_run(mnist_run)
    pixels = torch.stack([torch.from_numpy(np.array(digit)) for digit, _ in pictures])
    with torch.inference_mode():
        probability, prediction = model(pixels[:, None]).max(1)
        model.calibration["temperature"] = 1.0  # calibrated it says another probability
        raw = model(pixels[:, None]).amax(1)
    tensors, _ = saved(mnist_run, "predictions")
    assert torch.equal(prediction, tensors["prediction"])
    assert torch.equal(pixels[:, None], tensors["image"])
    assert torch.allclose(raw, tensors["logits"].softmax(1).amax(1), atol=1e-5)
    assert not torch.allclose(raw, probability)
    accuracy = sum(p == label for p, (_, label) in zip(prediction.tolist(), pictures, strict=True))
    assert accuracy == round(rows(mnist_run)[-1]["eval_accuracy"] * NUM_TEST)


def test_weights_of_an_unfinished_run_are_said_to_be(mnist_run, pictures, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(mnist_run, copy)
    pictures[0][0].save(tmp_path / "0.png")
    (copy / "DONE").unlink()
    predict.main([str(copy), str(tmp_path / "0.png")])
    assert f"{copy} has not finished" in capsys.readouterr().out


def forge(run_dir: Path, folder: Path, **changes: object) -> Path:
    """A run folder with the weights of another one and metadata that say something else."""
    folder.mkdir()
    weights, about = saved(run_dir)
    about = {k: v for k, v in (about | changes).items() if v is not None}
    write_tensors(folder / "model.safetensors", weights, about)
    return folder


def test_what_cannot_be_used_is_refused_in_one_sentence(mnist_run, tmp_path):
    text, blank = tmp_path / "text.png", tmp_path / "blank.png"
    text.write_text("not a picture")
    Image.new("L", (50, 50), "white").save(blank)
    empty = tmp_path / "empty"
    empty.mkdir()
    wrong = [
        ([mnist_run], "name the files"),
        ([mnist_run, text], "text.png cannot be read"),
        ([mnist_run, blank], "blank.png is blank"),
        ([mnist_run, tmp_path], "cannot be read as a picture: IsADirectoryError"),
        ([mnist_run, tmp_path / "absent.png"], "absent.png cannot be read"),
        ([empty, blank], "empty is not a finished run"),
    ]
    for arguments, message in wrong:
        with pytest.raises(UsageError, match=message) as caught:
            predict.main([str(argument) for argument in arguments])
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"train_abcde\.py"):
        predict.main([str(forge(mnist_run, tmp_path / "forged", script="train_abcde")), str(blank)])


# Files of eight bytes and what they announce; safetensors itself finds out what else is wrong.
FORGED = {"a header beyond the file": b"d" + bytes(7), "no metadata": b"\2" + bytes(7) + b"{}"}


@pytest.mark.parametrize("case", FORGED)
def test_a_model_file_that_is_none_is_one_sentence(case, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(FORGED[case])
    with pytest.raises(UsageError, match=r"model\.safetensors is not a model") as raised:
        predict.main([str(tmp_path), "a.png"])
    assert "\n" not in str(raised.value)
    (tmp_path / "model.safetensors").rename(tmp_path / records.PREDICTIONS)
    if case != "no metadata":
        with pytest.raises(UsageError, match=r"predictions\.safetensors cannot be read"):
            records.load_predictions(tmp_path / records.PREDICTIONS)


@posix_only  # links
@pytest.mark.parametrize(
    "name", ["../evil", "/tmp/evil", "evil/evil", "evil.py", "a.b", "", "link", None]
)
def test_a_script_elsewhere_is_not_run(name, mnist_run, tmp_path, monkeypatch):
    home = tmp_path / "home"
    for path in (tmp_path / "evil.py", home / "evil" / "evil.py", home / "a.b.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('it was run')")
    (home / "link.py").symlink_to(tmp_path / "evil.py")
    monkeypatch.setattr(predict, "FOLDERS", (home,))
    with pytest.raises(
        UsageError, match=r"is not beside predict\.py: .* --script PATH|is not a model"
    ) as raised:
        predict.load_run(forge(mnist_run, tmp_path / "forged", script=name))
    assert "it was run" not in str(raised.value)


def test_a_script_that_predict_cannot_use_gets_one_sentence(mnist_run, tmp_path):
    script, forged = tmp_path / "train_mine.py", forge(mnist_run, tmp_path / "forged")
    for source, message in (
        ("MODELS = {}", r"needs two things from it: make_model\(metadata\), and \"input\""),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ):
        script.write_text(source)
        with pytest.raises(UsageError, match=message):
            predict.load_run(forged, script)
    with pytest.raises(UsageError, match=r"--script .* is not a Python file"):
        predict.load_run(forged, tmp_path / "absent.py")
    with pytest.raises(UsageError, match="one of picture, photo, table"):
        predict.load_run(forge(mnist_run, tmp_path / "sound", input="sound"))


def test_a_run_of_an_earlier_version_is_told_of(mnist_run, tmp_path):
    """It did not say its kind, and had the calibration and the framing in the metadata."""
    framing = {"read_as": "", "shape": [28, 28], "border": [0, 0], "frame": [0.7, 0.5, 0.5]}
    old = forge(mnist_run, tmp_path / "old", input=None, pictures={**framing, "most_ink": 0.3})
    said = {"classes": [*"0123456789"], "calibration": {"temperature": 0.5, "threshold": 0.25}}
    write_tensors(old / records.PREDICTIONS, {"probability": torch.ones(3)}, said)
    predictor = predict.load_run(old)
    assert predictor.calibration == said["calibration"] and predictor.framing["most_ink"] == 0.3
    page = Image.new("L", (90, 60), "white")
    page.paste(20, (40, 10, 46, 50))
    page.save(tmp_path / "page.png")
    with torch.inference_mode():
        assert predictor.predict_file(tmp_path / "page.png")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "nothing"}, "KeyError"),
        ({"model": "wide"}, "not those of the model that it names"),
        ({"classes": ["a"] * 10**6}, "not those of the model that it names"),
        ({"classes": 3}, "TypeError"),
        ({"input": ["picture"]}, "TypeError"),
    ],
)
def test_metadata_that_do_not_fit_the_weights_are_one_sentence(
    changes, message, mnist_run, tmp_path
):
    with pytest.raises(UsageError, match=message) as raised:
        predict.load_run(forge(mnist_run, tmp_path / "forged", **changes))
    assert "\n" not in str(raised.value) and "is not a model" in str(raised.value)


def test_as_is_leaves_the_polarity_of_a_picture(mnist_run, pictures, tmp_path, capsys):
    path = tmp_path / "page.png"
    Image.eval(pictures[0][0], lambda value: 255 - value).save(path)
    said = []
    for flags in ([], ["--as-is"]):
        predict.main([*flags, str(mnist_run), str(path)])
        said.append(capsys.readouterr().out)
    assert said[0] != said[1]


def test_a_table_gets_its_predictions_beside_its_rows(table_run, tmp_path, capsys):
    path = shutil.copy(table_run.parent / "houses.csv", tmp_path)
    predict.main([str(table_run), str(path)])
    output = tmp_path / "houses_predictions.csv"
    path_line, names, *first_rows = capsys.readouterr().out.splitlines()
    assert path_line == str(output) and len(first_rows) == 5
    assert names.split() == ["area", "city", "age", "price", "predicted_price"]
    said = pd.read_csv(output)
    assert said[["area", "city", "age", "price"]].equals(pd.read_csv(path))
    tensors, _ = saved(table_run, "predictions")
    expected = said.predicted_price[tensors["index"].tolist()].tolist()
    assert expected == pytest.approx(tensors["prediction"][:, 0].tolist(), rel=1e-5)
    with pytest.raises(UsageError, match=r"absent\.csv cannot be read"):
        predict.main([str(table_run), str(tmp_path / "absent.csv")])
    with pytest.raises(
        UsageError, match="--as-is does not apply to a model whose input is a table"
    ):
        predict.main([str(table_run), "--as-is", str(path)])


def test_a_photo_is_answered_in_colour_and_called_unsure_if_it_is_faint(tmp_path, capsys):
    run_dir = colours.make_run(tmp_path / "photos")
    flags = [str(run_dir), "--script", colours.__file__]
    (tmp_path / "text.jpg").write_text("not a picture")
    shares = [("red", 0.9), ("green", 0.8), ("blue", 0.9), ("blue", 0.02)]
    paths = [str(colours.photograph(tmp_path, *share)) for share in shares]
    predict.main([*flags, *paths])
    said = capsys.readouterr().out.splitlines()
    for path, (name, _), text in zip(paths[:3], shares, said, strict=False):
        assert text.startswith(f"{path}: {name} 99.")
    assert said[3].startswith(f"{paths[3]}: unsure, perhaps ")
    with pytest.raises(UsageError, match=r"text\.jpg cannot be read as a picture: ValueError"):
        predict.main([*flags, str(tmp_path / "text.jpg")])
    with pytest.raises(
        UsageError, match="--as-is does not apply to a model whose input is a photo"
    ):
        predict.main([*flags, paths[0], "--as-is"])
    (run_dir / "pretrained" / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"FileNotFoundError: .*pretrained"):
        predict.main([*flags, paths[0]])


def test_photos_are_given_the_numbers_of_their_evaluation(tmp_path):
    predictor = predict.load_run(colours.make_run(tmp_path / "run"), Path(colours.__file__))
    temperature = predictor.calibration["temperature"]
    expected = (predictor.evaluated["logits"] / temperature).softmax(1)
    for number in (0, 20, 49):
        path = colours.photograph(tmp_path, colours.CLASSES[number % 3], 0.1 + number / 70)
        pixels, doubt = predictor.read(path)
        assert torch.allclose(predictor(pixels)[0], expected[number], atol=1e-5) and not doubt
