"""The numbers behind each picture, and pictures that the files of a run folder alone give again."""

import warnings
from pathlib import Path

import pytest
import torch
from conftest import rows, saved
from PIL import Image

from trainkit.plots import curves, figures
from trainkit.tools import plots

FLAGS = "--model lenet --batch-size 16 --epochs 2 --log-every 5 --run-dir"


@pytest.fixture(scope="module")
def run_dir(tiny_mnist, tmp_path_factory, run_main):
    """A run of two epochs, stopped after 30 of its 40 steps and continued."""
    folder = tmp_path_factory.mktemp("runs") / "parts"
    for more in ("--stop-after-steps 30", "--resume latest"):
        run_main("train_mnist", "--dataset", tiny_mnist, f"{FLAGS} {folder} {more}")
    return folder


def test_pictures_need_the_files_of_a_run_alone(run_dir, capsys):
    capsys.readouterr()
    plots.main([str(run_dir)])
    drawn = list(map(Path, capsys.readouterr().out.splitlines()))
    assert [path.name for path in drawn] == ["curves.png", "confusion.png", "mistakes.png"]
    for path in drawn:
        with Image.open(path) as picture:
            assert min(picture.size) > 500, path


def test_confusion_counts_every_sample_once_and_its_diagonal_is_the_accuracy(run_dir):
    tensors, metadata = saved(run_dir, "predictions")
    accuracy = rows(run_dir, "epochs")[-1]["eval_accuracy"]
    matrix = figures.confusion_matrix(tensors["prediction"], tensors["target"], 10)
    assert matrix.sum() == 101 and matrix.trace() == round(accuracy * 101)
    axes = figures.draw_confusion(tensors, metadata["classes"]).axes[0]
    assert sum(int(text.get_text().split("\n")[0]) for text in axes.texts) == 101
    assert f"of 101 right ({accuracy:.2%})" in axes.get_title()


def test_curves_show_every_row_and_where_the_run_was_resumed(run_dir):
    panels = curves.draw_curves(run_dir).axes
    loss, accuracy, rate = ({line.get_label(): line for line in axes.lines} for axes in panels)
    steps, epochs = rows(run_dir, "steps"), rows(run_dir, "epochs")
    for line, logged, name in (
        (loss["training"], steps, "train_loss"),
        (loss["evaluation"], epochs, "eval_loss"),
        (accuracy["evaluation"], epochs, "eval_accuracy"),
        (accuracy["training, mean of the epoch"], epochs, "train_accuracy"),
        (next(iter(rate.values())), steps, "learning_rate"),
    ):
        assert line.get_xydata().tolist() == [[row["step"], row[name]] for row in logged], name
    assert {*loss["resumed"].get_xdata()} == {30}


def test_fit_shows_predictions_and_residuals():
    truth = torch.tensor([[6.0], [0.0], [3.0]])
    tensors = {"prediction": truth + 1, "target": truth}
    against, residuals = figures.draw_fit(tensors, {"targets": ["price"]}).axes
    assert against.collections[0].get_offsets().tolist() == [[6, 7], [0, 1], [3, 4]]
    assert residuals.collections[0].get_offsets()[:, 1].tolist() == [1, 1, 1]
    assert "1" in residuals.get_title() and residuals.get_ylabel() == "predicted - true price"


NAMES = [
    "$5 up to $10_",
    "$\\frac$",
    "$x_1$",
    "a\\b$c",
    "\u5c71",
    "Tussilago_farfara_common_coltsfoot",
]


def test_names_are_drawn_as_they_are_written(tmp_path):
    """No TeX; and a letter that no font has is a box, without a warning for each."""
    target = torch.arange(6)
    images = torch.zeros(6, 1, 28, 28, dtype=torch.uint8)
    tensors = {"prediction": 5 - target, "target": target, "image": images}
    tensors["logits"] = torch.eye(6)[5 - target]
    drawn = [figures.draw_confusion(tensors, NAMES), figures.draw_mistakes(tensors, NAMES)]
    values = torch.rand(9, 2)
    fit = {"prediction": values, "target": values}
    drawn += [figures.draw_fit(fit, {"targets": ["$\\frac$", "$a$ \u5c71"]})]
    for figure in drawn:
        with warnings.catch_warnings(action="error"):
            warnings.filterwarnings("ignore", r"Glyph \d+ ")  # as trainkit/plots/style.py does
            figure.savefig(tmp_path / "drawn.png")
    labels = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert labels == [*NAMES[:5], "Tussilago_farfara_com..."]
    assert drawn[1].axes[0].get_title() == "predicted $\\frac$,\n35.22%\ntrue \u5c71"


def test_a_run_draws_what_the_network_sees_before_its_first_step(
    run_dir, tiny_mnist, tmp_path, run_main, capsys
):
    flags = ["--dataset", tiny_mnist, "--stop-after-steps=1", "--run-dir", tmp_path / "run"]
    run_main("train_mnist", *flags, "--pictures")
    said, path = capsys.readouterr().out, tmp_path / "run" / "input.png"
    drawn_at = said.index(f"as the network sees them: {path}\n")
    assert said.index("run folder") < drawn_at < said.index("epoch  ") and path.exists()
    assert not (run_dir / path.name).exists()  # with --no-pictures
