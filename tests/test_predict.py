"""A run folder alone is enough to use its model, and a wrong file is one sentence."""

import csv
import io
import json
import pickle
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import NUM_TEST, ROOT, posix_only, rows, run, saved
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

import predict
from datakit.pictures import load_images
from modelkit.photos import read_picture
from trainkit.errors import RunFailure, UsageError
from trainkit.folder import records


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
        "--model",
        "lenet",
        "--batch-size",
        32,
        "--epochs",
        3,
        "--no-augment",
        "--label-smoothing",
        0,
    )
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
    for digit, label in pictures[:20]:
        paths = in_many_forms(digit, tmp_path)
        probability, prediction = classify(model, paths["same.png"], about)
        if prediction != label or probability < 0.9:
            continue  # what the model is unsure of proves nothing about the files
        num_digits += 1
        for name, path in paths.items():
            right[name] = right.get(name, 0) + (classify(model, path, about)[1] == label)
    assert num_digits > 8
    for name in ("same.png", "negative.png", "sixteen_bits.png"):
        assert right[name] == num_digits, name
    assert all(count >= 0.9 * num_digits for count in right.values()), (num_digits, right)
    capsys.readouterr()
    predict.main([str(run_dir), str(paths["same.png"]), str(paths["page.jpg"])])
    first, second = capsys.readouterr().out.splitlines()
    expected = f"{prediction} {probability:.2%}"
    assert first.startswith(f"{paths['same.png']}: {expected}  (then ")
    assert second.startswith(f"{paths['page.jpg']}: ")


def classify(model: torch.nn.Module, path: Path, about: dict) -> tuple[float, int]:
    with torch.inference_mode():
        best = model(read_picture(path, 28, about["pictures"]))[0].max(0)
    return best.values.item(), best.indices.item()


def test_predictions_are_those_of_the_last_evaluation(run_dir: Path, pictures: list) -> None:
    model, _ = predict.load_run(run_dir)
    pixels = torch.stack([torch.from_numpy(np.array(digit)) for digit, _ in pictures])
    with torch.inference_mode():
        probability, prediction = model(pixels[:, None]).max(1)
        model.calibration["temperature"] = 1.0
        raw = model(pixels[:, None]).amax(1)
    tensors, about = saved(run_dir, "predictions")
    assert torch.equal(prediction, tensors["prediction"])
    assert torch.allclose(raw, tensors["probability"], atol=1e-5)
    unsure = (probability < about["calibration"]["threshold"]).float().mean().item()
    assert unsure == pytest.approx(0.05, abs=0.02) and not torch.allclose(raw, probability)
    accuracy = sum(p == label for p, (_, label) in zip(prediction.tolist(), pictures, strict=True))
    assert accuracy == round(rows(run_dir)[-1]["eval_accuracy"] * NUM_TEST)


def test_onnx_and_pytorch_agree_on_all_10000_test_pictures(run_dir: Path) -> None:
    for package in predict.ONNX_PACKAGES:
        pytest.importorskip(package)
    import onnx
    import onnxruntime

    predict.main([str(run_dir), "--export", "onnx"])
    pixels = load_images(str(ROOT / "data" / "mnist"), "test", 28)[0].tensors[0]
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
    shutil.copy(run_dir / "model.safetensors", tmp_path)
    monkeypatch.setattr(predict, "TOLERANCE", -1.0)
    with torch.inference_mode(), pytest.raises(RunFailure, match="differ by"):
        predict.export_onnx(model, about, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_weights_of_an_unfinished_run_are_said_to_be(
    run_dir: Path, pictures: list, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    pictures[0][0].save(tmp_path / "0.png")
    for done, said in ((True, False), (False, True)):
        if not done:
            (copy / "DONE").unlink()
        predict.main([str(copy), str(tmp_path / "0.png")])
        assert (f"{copy} has not finished" in capsys.readouterr().out) == said


def test_a_missing_onnx_package_is_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "ONNX_PACKAGES", ("onnx", "no_such_package"))
    with pytest.raises(UsageError, match=r"pip install .*no_such_package"):
        predict.main([str(run_dir), "--export", "onnx"])


def forge(run_dir: Path, folder: Path, **changes: object) -> Path:
    """A run folder with the weights of another one and metadata that say something else."""
    folder.mkdir()
    with safe_open(run_dir / "model.safetensors", "pt") as file:
        about = json.loads(file.metadata()["trainkit"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    about = {k: v for k, v in (about | changes).items() if v is not None}
    save_file(weights, folder / "model.safetensors", {"trainkit": json.dumps(about)})
    return folder


def test_what_cannot_be_used_is_refused_in_one_sentence(run_dir: Path, tmp_path: Path) -> None:
    text, blank, colour = (tmp_path / name for name in ("text.png", "blank.png", "colour.png"))
    text.write_text("not a picture")
    Image.new("L", (50, 50), "white").save(blank)
    Image.new("RGB", (28, 28)).save(colour)
    empty = tmp_path / "empty"
    empty.mkdir()
    wrong = [
        ([run_dir], "name the files"),
        ([run_dir, text], "text.png cannot be read"),
        ([run_dir, blank], "blank.png is blank"),
        ([run_dir, tmp_path], "cannot be read as a picture: IsADirectoryError"),
        ([run_dir, tmp_path / "absent.png"], "absent.png cannot be read"),
        ([empty, colour], "empty is not a finished run"),
    ]
    for arguments, message in wrong:
        with pytest.raises(UsageError, match=message) as caught:
            predict.main([str(argument) for argument in arguments])
        assert "\n" not in str(caught.value)
    # Exit code 2 and one line from a started process.
    done = run("predict.py", forge(run_dir, tmp_path / "forged", script="train_abcde"), colour)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "train_abcde.py" in done.stderr
    assert done.stderr.count("\n") == 1


def header(size: int, content: bytes = b"{}") -> bytes:
    return struct.pack("<q", size) + content


FORGED = {
    "no header": b"\x10",
    "a header of 2**62 bytes": header(2**62),
    "a negative header": header(-1),
    "a header beyond the file": header(100),
    "a header that is no JSON": header(4, b"\x80\x04K."),
    "a pickle": pickle.dumps({"a": 1}),
    "no metadata": header(2),
    "a tensor beyond the file": header(
        70, b'{"a":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]}}'[:70]
    ),
    "metadata that are no JSON": header(32, b'{"__metadata__":{"trainkit":""}}'),
    "metadata of another kind": header(34, b'{"__metadata__":{"trainkit":"[1]"}}'[:34] + b"}"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_model_file_that_is_none_is_one_sentence(case: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(FORGED[case])
    with pytest.raises(UsageError, match=r"model\.safetensors is not a model") as raised:
        predict.main([str(tmp_path), "a.png"])
    assert "\n" not in str(raised.value)
    (tmp_path / "model.safetensors").rename(tmp_path / records.PREDICTIONS)
    if case not in ("no metadata", "metadata of another kind"):
        with pytest.raises(UsageError, match=r"predictions\.safetensors cannot be read"):
            records.load_predictions(tmp_path / records.PREDICTIONS)


@posix_only  # links
@pytest.mark.parametrize(
    "name", ["../evil", "/tmp/evil", "evil/evil", "evil.py", "a.b", "", 5, ["evil"], "link", None]
)
def test_a_script_elsewhere_is_not_run(
    name: object, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    for path in (tmp_path / "evil.py", home / "evil" / "evil.py", home / "a.b.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('it was run')")
    (home / "link.py").symlink_to(tmp_path / "evil.py")
    monkeypatch.setattr(predict, "FOLDERS", (home,))
    with pytest.raises(UsageError, match=r"is not beside predict\.py|is not a model"):
        predict.load_run(forge(run_dir, tmp_path / "forged", script=name))


def test_a_script_without_a_predictor_gets_one_sentence(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train_mine.py").write_text("MODELS = {}\n")
    monkeypatch.setattr(predict, "FOLDERS", (tmp_path,))
    with pytest.raises(UsageError, match=r"train_mine\.py, which made the run, has no class Pred"):
        predict.load_run(forge(run_dir, tmp_path / "forged", script="train_mine"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "nothing"}, "KeyError"),
        ({"model": None}, "KeyError"),
        ({"model": "wide"}, "not those of the model that it names"),
        ({"classes": ["a"] * 10**6}, "not those of the model that it names"),
        ({"classes": 3}, "TypeError"),
    ],
)
def test_metadata_that_do_not_fit_the_weights_are_one_sentence(
    changes: dict, message: str, run_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        predict.load_run(forge(run_dir, tmp_path / "forged", **changes))
    assert "\n" not in str(raised.value) and "is not a model" in str(raised.value)


def test_as_is_works_in_every_position(
    run_dir: Path, pictures: list, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "page.png"
    Image.eval(pictures[0][0], lambda value: 255 - value).save(path)
    said = set()
    for arguments in (
        ["--as-is", run_dir, path],
        [run_dir, "--as-is", path],
        [run_dir, path, "--as-is"],
        [run_dir, path],
    ):
        predict.main([str(argument) for argument in arguments])
        said.add((capsys.readouterr().out, "--as-is" in arguments))
    assert len(said) == 2 and len({text for text, _ in said}) == 2


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
        records.append(
            {
                "name": f"house {number}",
                "area": shown,
                "city": city,
                "price": f"{price:.2f}",
                "rent": f"{price / 300:.3f}",
            }
        )
    path = folder / "houses.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, records[0])
        writer.writeheader()
        writer.writerows(records)
    run_main(
        "train_regression",
        "--data",
        path,
        "--target",
        "price,rent",
        "--features",
        "area,city",
        "--missing",
        "impute",
        "--model",
        "mlp",
        "--epochs",
        60,
        "--run-dir",
        folder / "run",
    )
    return folder / "run", path, records


@needs_regression
def test_a_table_gets_its_predictions_beside_its_rows(
    table_run: tuple[Path, Path, list[dict[str, str]]], capsys: pytest.CaptureFixture
) -> None:
    run_dir, path, records = table_run
    predict.main([str(run_dir), str(path)])
    output = path.with_name("houses_predictions.csv")
    path_line, names, *first_rows = capsys.readouterr().out.splitlines()
    assert path_line == str(output) and len(first_rows) == 5
    assert names.split()[0] == "name" and names.split()[-1] == "predicted_rent"
    with open(output, newline="") as file:
        written = list(csv.DictReader(file))
    assert [{name: row[name] for name in records[0]} for row in written] == records
    tensors, _ = saved(run_dir, "predictions")
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
    with pytest.raises(UsageError, match="--as-is means nothing to the models of train_regression"):
        predict.main([str(run_dir), "--as-is", str(path)])


@needs_regression
def test_onnx_and_pytorch_agree_on_a_table(
    table_run: tuple[Path, Path, list[dict[str, str]]],
) -> None:
    for package in predict.ONNX_PACKAGES:
        pytest.importorskip(package)
    predict.main([str(table_run[0]), "--export", "onnx"])
    import onnxruntime

    session = onnxruntime.InferenceSession(table_run[0] / "model.onnx")
    assert session.get_inputs()[0].type == "tensor(double)"  # see the next test


@needs_regression
def test_times_in_milliseconds_survive_an_export(tmp_path: Path, run_main: Callable) -> None:
    """float32 tells them apart by two minutes."""
    times = 1.7e12 + 60_000 * np.arange(60)
    (tmp_path / "t.csv").write_text(
        "ms,y\n" + "".join(f"{time:.0f},{number}\n" for number, time in enumerate(times))
    )
    flags = ["--data", tmp_path / "t.csv", "--target", "y", "--epochs", 200]
    run_main("train_regression", *flags, "--run-dir", tmp_path / "run")
    predict.main([str(tmp_path / "run"), "--export", "hub"])
    hub = tmp_path / "run" / "hub"
    card = (hub / "README.md").read_text()
    (code,) = re.findall(r"```python\n(import torch\nfrom model.*?)```", card, re.S)
    done = subprocess.run([sys.executable, "-c", code], cwd=hub, text=True, capture_output=True)
    answer, truth = re.findall(r"# (\S+); the truth: (\S+)", code)[0]
    assert done.stdout == f"{answer}\n", done.stderr
    answer, truth = (float(number.replace(",", "")) for number in (answer, truth))
    assert answer == pytest.approx(truth, 1e-3)


def test_predict_needs_none_of_the_optional_packages() -> None:
    started = run(str(Path("predict.py")), "--help")
    assert started.returncode == 0 and "--export" in started.stdout
    assert sys.modules["predict"].ONNX_PACKAGES == ("onnx", "onnxscript", "onnxruntime")
