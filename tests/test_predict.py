"""A run folder alone is enough to use its model, and a wrong file is one sentence."""

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import NUM_TEST, ROOT, rows, run
from PIL import Image

import predict
from trainkit import plots
from trainkit.launch import RunFailure, UsageError


@pytest.fixture(scope="module")
def run_dir(
    small_mnist: Path, tmp_path_factory: pytest.TempPathFactory, run_main: Callable
) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mnist"
    run_main("train_mnist", "--dataset", small_mnist, "--run-dir", folder, "--model", "lenet",
             "--batch-size", 32, "--epochs", 3, "--no-augment", "--label-smoothing", 0)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def pictures(small_mnist: Path) -> list[tuple[Image.Image, int]]:
    table = pq.read_table(small_mnist / "test-00000-of-00001.parquet").to_pydict()
    images = [Image.open(io.BytesIO(image["bytes"])) for image in table["image"]]
    return list(zip(images, table["label"], strict=True))


def in_many_forms(digit: Image.Image, folder: Path) -> dict[str, Path]:
    """The same digit, bright on black, as files of other sizes, modes and polarity."""
    negative = Image.eval(digit, lambda value: 255 - value)
    page = Image.new("RGB", (400, 300), "white")  # black ink, small, in a corner of a large page
    page.paste(negative.resize((140, 140)).convert("RGB"), (30, 120))
    ink = Image.new("RGBA", digit.size, (0, 0, 0, 0))
    ink.putalpha(digit)
    deep = Image.fromarray(np.asarray(digit, dtype=np.uint16) * 256)  # the low byte says nothing
    forms = {
        "same.png": digit,
        "negative.png": negative,
        "page.jpg": page,
        "large.png": digit.resize((224, 224)),
        "bits.png": digit.convert("1"),
        "palette.gif": digit.convert("P"),
        "transparent.png": ink.resize((90, 90)),
        "sixteen_bits.png": deep,
        "print.tiff": negative.resize((64, 64)).convert("CMYK"),
    }
    for name, picture in forms.items():
        picture.save(folder / name)
    return {name: folder / name for name in forms}


def test_the_digit_is_told_from_any_size_mode_and_polarity(
    run_dir: Path, pictures: list, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model, about = predict.load_run(run_dir)
    right, num_digits = {}, 0
    for digit, label in pictures[:60]:
        paths = in_many_forms(digit, tmp_path)
        probability, prediction = classify(model, predict.read_picture(paths["same.png"], 28))
        if prediction != label or probability < 0.9:
            continue  # what the model is unsure of proves nothing about the files
        num_digits += 1
        for name, path in paths.items():
            picture = predict.read_picture(path, about["size"])
            right[name] = right.get(name, 0) + (classify(model, picture)[1] == label)
    assert num_digits > 25
    for name in ("same.png", "negative.png", "sixteen_bits.png"):
        assert right[name] == num_digits, name
    assert all(count >= 0.9 * num_digits for count in right.values()), (num_digits, right)
    capsys.readouterr()
    predict.main([str(run_dir), str(paths["same.png"]), str(paths["page.jpg"])])
    first, second = capsys.readouterr().out.splitlines()
    expected = f"{prediction} {probability:.2%}"
    assert first.startswith(f"{paths['same.png']}: {expected}  (then ")
    assert second.startswith(f"{paths['page.jpg']}: ")


def classify(model: torch.nn.Module, picture: np.ndarray) -> tuple[float, int]:
    with torch.inference_mode():
        best = model(torch.from_numpy(picture)[None, None])[0].max(0)
    return best.values.item(), best.indices.item()


def test_a_training_picture_is_taken_as_it_is(pictures: list, tmp_path: Path) -> None:
    for number, (digit, _) in enumerate(pictures[:20]):
        digit.save(tmp_path / f"{number}.png")
        expected = np.asarray(digit)
        for as_is in (False, True):
            read = predict.read_picture(tmp_path / f"{number}.png", 28, as_is)
            assert np.array_equal(read, expected)


def test_predictions_are_those_of_the_last_evaluation(run_dir: Path, pictures: list) -> None:
    model, _ = predict.load_run(run_dir)
    pixels = torch.stack([torch.from_numpy(np.array(digit)) for digit, _ in pictures])
    with torch.inference_mode():
        probability, prediction = model(pixels[:, None]).max(1)
    tensors, _ = plots._load(run_dir / plots.PREDICTIONS)
    assert torch.equal(prediction, tensors["prediction"])
    assert torch.allclose(probability, tensors["probability"], atol=1e-5)
    accuracy = sum(p == label for p, (_, label) in zip(prediction.tolist(), pictures, strict=True))
    assert accuracy == round(rows(run_dir)[-1]["eval_accuracy"] * NUM_TEST)


def test_onnx_and_pytorch_agree_on_all_10000_test_pictures(run_dir: Path) -> None:
    for package in predict.ONNX_PACKAGES:
        pytest.importorskip(package)
    import onnx
    import onnxruntime

    import train_mnist

    predict.main([str(run_dir), "--export", "onnx"])
    pixels = train_mnist.load_images(str(ROOT / "data" / "mnist"), "test")[0].images
    assert len(pixels) == 10_000
    session = onnxruntime.InferenceSession(run_dir / "model.onnx")
    outputs = torch.from_numpy(session.run(None, {"inputs": pixels.numpy()})[0])
    model, about = predict.load_run(run_dir)
    with torch.inference_mode():
        expected = torch.cat([model(part) for part in pixels.split(1000)])
    assert torch.equal(outputs.argmax(1), expected.argmax(1))
    assert (outputs - expected).abs().max() <= 1e-5
    assert torch.allclose(outputs.sum(1), torch.ones(10_000), atol=1e-5)
    saved = {item.key: item.value for item in onnx.load(run_dir / "model.onnx").metadata_props}
    assert json.loads(saved["trainkit"])["classes"] == about["classes"] == list("0123456789")


def test_an_export_that_differs_is_removed(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in predict.ONNX_PACKAGES:
        pytest.importorskip(package)
    model, about = predict.load_run(run_dir)
    monkeypatch.setattr(predict, "TOLERANCE", -1.0)
    with pytest.raises(RunFailure, match="differ by"):
        predict.export_onnx(model, about, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_onnx_package_is_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "ONNX_PACKAGES", ("onnx", "no_such_package"))
    with pytest.raises(UsageError, match=r"pip install .*no_such_package"):
        predict.main([str(run_dir), "--export", "onnx"])


def test_what_cannot_be_used_is_refused_in_one_sentence(run_dir: Path, tmp_path: Path) -> None:
    text, blank, colour = (tmp_path / name for name in ("text.png", "blank.png", "colour.png"))
    text.write_text("not a picture")
    Image.new("L", (50, 50), "white").save(blank)
    Image.new("RGB", (28, 28)).save(colour)
    empty, forged = tmp_path / "empty", tmp_path / "forged"
    empty.mkdir()
    forged.mkdir()
    (forged / "model.safetensors").write_bytes(b"\x10" * 100)
    wrong = [
        ([run_dir], "name the files"),
        ([run_dir, text], "text.png cannot be read"),
        ([run_dir, blank], "blank.png is blank"),
        ([run_dir, tmp_path / "absent.png"], "absent.png cannot be read"),
        ([empty, colour], "empty is not a finished run"),
        ([forged, colour], "forged/model.safetensors is not a model"),
    ]
    for arguments, message in wrong:
        with pytest.raises(UsageError, match=message) as caught:
            predict.main([str(argument) for argument in arguments])
        assert "\n" not in str(caught.value)
    # A run that another script made, and exit code 2 from a started process.
    (forged / "model.safetensors").write_bytes(
        (run_dir / "model.safetensors").read_bytes().replace(b"train_mnist", b"train_abcde")
    )
    done = run("predict.py", forged, colour)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "train_abcde.py" in done.stderr
    assert done.stderr.count("\n") == 1


needs_regression = pytest.mark.skipif(
    not (ROOT / "train_regression.py").exists(), reason="train_regression.py is not here"
)


@pytest.fixture(scope="module")
def table_run(
    tmp_path_factory: pytest.TempPathFactory, run_main: Callable
) -> tuple[Path, Path, list[dict[str, str]]]:
    """A run on a table with a category, a missing value and two targets on large scales."""
    folder = tmp_path_factory.mktemp("tables")
    generator = np.random.default_rng(0)
    records = []
    for number in range(200):
        area, city = generator.uniform(20, 200), ("Bonn", "Rome", "Oslo")[number % 3]
        price = 3000 * area + 50_000 * (number % 3) + generator.normal(0, 1000)
        shown = "" if number == 7 else f"{area:.3f}"
        records.append({"name": f"house {number}", "area": shown, "city": city,
                        "price": f"{price:.2f}", "rent": f"{price / 300:.3f}"})  # fmt: skip
    path = folder / "houses.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, records[0])
        writer.writeheader()
        writer.writerows(records)
    run_main("train_regression", "--data", path, "--target", "price,rent", "--features",
             "area,city", "--missing", "impute", "--model", "mlp", "--epochs", 60,
             "--run-dir", folder / "run")  # fmt: skip
    return folder / "run", path, records


@needs_regression
def test_a_table_gets_its_predictions_beside_its_rows(
    table_run: tuple[Path, Path, list[dict[str, str]]], capsys: pytest.CaptureFixture
) -> None:
    run_dir, path, records = table_run
    predict.main([str(run_dir), str(path)])
    output = path.with_name("houses_predictions.csv")
    assert capsys.readouterr().out.splitlines()[-1] == str(output)
    with open(output, newline="") as file:
        written = list(csv.DictReader(file))
    assert [{name: row[name] for name in records[0]} for row in written] == records
    tensors, _ = plots._load(run_dir / plots.PREDICTIONS)
    for number, row in enumerate(tensors["index"].tolist()):
        said = [float(written[row][f"predicted_{name}"]) for name in ("price", "rent")]
        assert said == pytest.approx(tensors["prediction"][number].tolist(), rel=1e-5)
    errors = [abs(float(row["predicted_price"]) / float(row["price"]) - 1) for row in written]
    assert np.median(errors) < 0.05
    path.write_text("area,town\n10,Bonn\n")
    with pytest.raises(UsageError, match="there is no column 'city'"):
        predict.main([str(run_dir), str(path)])
    with pytest.raises(UsageError, match=r"absent\.csv cannot be read"):
        predict.main([str(run_dir), str(path.with_name("absent.csv"))])


@needs_regression
def test_onnx_and_pytorch_agree_on_a_table(
    table_run: tuple[Path, Path, list[dict[str, str]]],
) -> None:
    for package in predict.ONNX_PACKAGES:
        pytest.importorskip(package)
    predict.main([str(table_run[0]), "--export", "onnx"])
    assert (table_run[0] / "model.onnx").stat().st_size > 1000


def test_predict_needs_none_of_the_optional_packages() -> None:
    started = run(str(Path("predict.py")), "--help")
    assert started.returncode == 0 and "--export" in started.stdout
    assert sys.modules["predict"].ONNX_PACKAGES == ("onnx", "onnxscript", "onnxruntime")
