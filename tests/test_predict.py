"""A run folder alone is enough to use its model, and a wrong file is one sentence."""

import shutil
from pathlib import Path

from trainkit import predict

import colours
import pandas as pd
import pytest
import torch
from conftest import posix_only, refused, saved
from PIL import Image, ImageOps

from trainkit.store.weights import write_tensors


def test_a_digit_is_read_in_either_polarity_and_from_a_corner_of_a_page(
    mnist_run, tmp_path, capsys
):
    predictor = predict.load_run(mnist_run)
    paths = [str(tmp_path / name) for name in ("same.png", "negative.png", "print.tiff")]
    pixels, target = (predictor.evaluated[name] for name in ("image", "target"))
    probability, prediction = predictor(pixels).max(1)
    sure = (probability > 0.9) & (prediction == target)  # else it proves nothing about the files
    read = []
    capsys.readouterr()
    for index in sure.nonzero()[:8, 0].tolist():
        digit = Image.fromarray(pixels[index, 0].numpy())
        negative = ImageOps.invert(digit)
        page = Image.new("RGB", (400, 300), "white")
        page.paste(negative.resize((140, 140)), (30, 120))
        for picture, path in zip((digit, negative, page.convert("CMYK")), paths, strict=True):
            picture.save(path)
        predict.main([str(mnist_run), *paths])
        said, inverted, printed = capsys.readouterr().out.splitlines()
        assert said == f"{paths[0]}: {predictor.describe(predictor(pixels[[index]])[0])}"
        assert inverted.startswith(f"{paths[1]}: {prediction[index]} ")
        read.append(printed.startswith(f"{paths[2]}: {prediction[index]} "))
    assert len(read) == 8 and sum(read) >= 7
    predict.main([str(mnist_run), "--as-is", paths[1]])
    assert capsys.readouterr().out.strip() != inverted


def test_predictions_are_those_of_the_last_evaluation(mnist_run):
    model, (tensors, _) = predict.load_run(mnist_run), saved(mnist_run, "predictions")
    probability, prediction = model(tensors["image"]).max(1)
    model.calibration["temperature"] = 1.0  # calibrated it says another probability
    raw = model(tensors["image"]).amax(1)
    assert torch.equal(prediction, tensors["prediction"])
    assert torch.allclose(raw, tensors["logits"].softmax(1).amax(1), atol=1e-5)
    assert not torch.allclose(raw, probability)


def forge(run_dir: Path, folder: Path, **changes: object) -> Path:
    """A run folder with the weights of another one and metadata that say something else."""
    folder.mkdir()
    weights, metadata = saved(run_dir)
    metadata = {k: v for k, v in (metadata | changes).items() if v is not None}
    write_tensors(folder / "model.safetensors", weights, metadata)
    return folder


# Files of eight bytes and what they announce; safetensors itself finds out what else is wrong.
FORGED = {"a header beyond the file": b"d" + bytes(7), "no metadata": b"\2" + bytes(7) + b"{}"}


@pytest.mark.parametrize("case", FORGED)
def test_a_model_file_that_is_none_is_one_sentence(case, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(FORGED[case])
    with refused(r"model\.safetensors is not a model"):
        predict.main([str(tmp_path), "a.png"])


@posix_only  # links
@pytest.mark.parametrize("name", ["../evil", "a.b", "link"])
def test_a_script_elsewhere_is_not_run(name, mnist_run, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    for path in (tmp_path / "evil.py", home / "a.b.py"):
        path.write_text("raise AssertionError('it was run')")
    (home / "link.py").symlink_to(tmp_path / "evil.py")
    monkeypatch.setattr(predict, "FOLDERS", (home,))
    with refused(r"is not beside predict\.py: .* --script PATH"):
        predict.load_run(forge(mnist_run, tmp_path / "forged", script=name))


def test_a_script_of_ones_own_says_what_is_printed_for_a_file(mnist_run, tmp_path, capsys):
    script, path = tmp_path / "train_mine.py", tmp_path / "wave.txt"
    script.write_text(
        "from train_mnist import make_model\n"
        "def answer(model, metadata, path):\n"
        "    return f'{path.read_text()}: {len(metadata[\"classes\"])} {model.training}'\n"
    )
    path.write_text("1 2 3")
    predict.main([str(mnist_run), "--script", str(script), str(path)])
    assert capsys.readouterr().out == "1 2 3: 10 False\n"
    with refused("does not apply to a model whose input is a file that"):
        predict.main([str(mnist_run), "--script", str(script), "--as-is", str(path)])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "nothing"}, "KeyError"),
        ({"classes": ["a"] * 11}, "RuntimeError"),
        ({"input": ["picture"]}, "TypeError"),
    ],
)
def test_metadata_that_do_not_fit_the_weights_are_one_sentence(
    changes, message, mnist_run, tmp_path
):
    with refused(f"is not a model.*{message}"):
        predict.load_run(forge(mnist_run, tmp_path / "forged", **changes))


def test_a_table_gets_its_predictions_beside_its_rows(table_run, tmp_path, capsys):
    path = Path(shutil.copy(table_run.parent / "houses.csv", tmp_path))
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
    path.write_text("area,city,age\n,Rome,1970-01-02\n50,Rome,1970-01-02\n")
    predict.main([str(table_run), str(path)])
    *_, without, with_area = capsys.readouterr().out.splitlines()
    assert without.split() == ["Rome", "1970-01-02"] and len(with_area.split()) == 4  # no NaN
    for words, said in (
        (["--as-is"], r"--as-is does not apply to .* is a table"),
        (["--csv", str(tmp_path / "a.csv")], "--csv is for pictures, and the input of this model"),
    ):
        with refused(said):
            predict.main([str(table_run), *words, str(path)])


def test_a_photo_is_answered_with_the_numbers_of_its_evaluation(tmp_path, capsys):
    run_dir = colours.make_run(tmp_path / "photos")
    flags = [str(run_dir), "--script", colours.__file__]
    (tmp_path / "text.jpg").write_text("not a picture")
    shares = [("red", 0.9), ("blue", 0.02)]
    paths = [str(colours.photograph(tmp_path, *share)) for share in shares]
    predict.main([*flags, *paths])
    sure, faint = capsys.readouterr().out.splitlines()
    assert sure.startswith(f"{paths[0]}: red 99.")
    assert faint.startswith(f"{paths[1]}: unsure, perhaps ")
    with refused(r"text\.jpg cannot be read as a picture: ValueError"):
        predict.main([*flags, str(tmp_path / "text.jpg")])
    predictor = predict.load_run(run_dir, Path(colours.__file__))
    expected = predictor.evaluated["logits"] / predictor.calibration["temperature"]
    for number in (0, 20, 49):
        path = colours.photograph(tmp_path, colours.CLASSES[number % 3], 0.1 + number / 70)
        pixels, doubt = predictor.read(path)
        assert torch.allclose(predictor(pixels)[0], expected[number].softmax(0), atol=1e-5)
        assert not doubt
    (run_dir / "pretrained" / "model.safetensors").unlink()
    with refused(r"FileNotFoundError: .*pretrained"):
        predict.main([*flags, paths[0]])


def test_of_a_folder_all_pictures_are_answered_and_written_as_a_table(mnist_run, tmp_path, capsys):
    predictor, folder = predict.load_run(mnist_run), tmp_path / "pages"
    for n, name in enumerate(("b.png", "a/=1+1.jpg", "a/caf\u00e9.png", ".hidden.png")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(predictor.evaluated["image"][n, 0].numpy()).save(folder / name)
    (folder / "c.png").write_text("not a picture")
    (folder / "notes.txt").write_text("none")
    capsys.readouterr()
    with refused("1 of 4 files cannot be used"):
        predict.main([str(mnist_run), str(folder), "--csv", str(tmp_path / "answers.csv")])
    *answers, last = capsys.readouterr().out.splitlines()
    assert last == f"4 answers in {tmp_path / 'answers.csv'}" and len(answers) == 4
    table = pd.read_csv(tmp_path / "answers.csv", keep_default_na=False)
    assert [*table] == ["file", "prediction", "probability", "doubt", "error"]
    names = [str(folder / name) for name in ("a/=1+1.jpg", "a/caf\u00e9.png", "b.png", "c.png")]
    assert table.file.tolist() == names
    assert "not one of PNG" in table.error[3] and table.prediction[3] == table.error[0] == ""
    shares, numbers = predictor(predictor.evaluated["image"][[2, 0]]).max(1)
    assert [*map(float, table.probability[1:3])] == pytest.approx(shares.tolist(), abs=1e-5)
    assert [*map(int, table.prediction[1:3])] == numbers.tolist()
    (tmp_path / "empty").mkdir()
    with refused("empty is a folder with no picture files"):
        predict.main([str(mnist_run), str(tmp_path / "empty")])
