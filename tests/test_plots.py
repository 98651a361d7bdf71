"""The numbers behind each picture, and pictures that the files of a run folder alone give again."""

import json
import warnings
from pathlib import Path

import colours
import numpy as np
import pytest
import torch
from conftest import refused, rows, saved
from PIL import Image

from trainkit.plots import curves, figures, style
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


def test_no_folder_and_one_that_is_no_run_are_a_sentence(tmp_path):
    with refused("^name a run folder, several, or a folder that holds several"):
        plots.main([])
    with refused("is not a run folder: it has no metrics.jsonl"):
        plots.main([str(tmp_path)])


def test_confusion_counts_every_sample_once_and_its_diagonal_is_the_accuracy(run_dir):
    tensors, metadata = saved(run_dir, "predictions")
    accuracy = rows(run_dir, "epochs")[-1]["eval_accuracy"]
    matrix = figures.confusion_matrix(tensors["prediction"], tensors["target"], 10)
    assert matrix.sum() == 101 and matrix.trace() == round(accuracy * 101)
    axes = figures.draw_confusion(tensors, metadata["classes"]).axes[0]
    assert sum(int(text.get_text().split("\n")[0]) for text in axes.texts) == 101
    assert f"of 101 right ({accuracy:.2%})" in axes.get_title()


def test_confusion_of_300_classes_is_a_picture_of_the_usual_size():
    target = torch.arange(300)
    figure = figures.draw_confusion({"prediction": target, "target": target}, [*"abc"] * 100)
    assert max(figure.get_size_inches()) < 17
    assert not figure.axes[0].texts and 20 < len(figure.axes[0].get_xticks()) < 40


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


@pytest.mark.parametrize("losses, scale", [([3, 2, 1.5], "linear"), ([2.0, *[0.3] * 30], "log")])
def test_a_wide_range_is_logarithmic_and_the_metric_of_keep_best_has_a_panel(
    losses, scale, tmp_path
):
    """Without a score of that name there are two panels."""
    (tmp_path / "run.json").write_text(json.dumps({"arguments": {"keep_best": "eval_gap:min"}}))
    log = [{"step": n, "train_loss": x, "learning_rate": 0.1} for n, x in enumerate(losses)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, log)))
    loss, rate = curves.draw_curves(tmp_path).axes
    assert (rate.get_ylabel(), loss.get_yscale()) == ("learning rate", scale)
    log[-1]["eval_gap"] = 0.25
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, log)))
    _, gap, _ = curves.draw_curves(tmp_path).axes
    assert (gap.get_ylabel(), [*gap.lines[0].get_ydata()]) == ("gap", [0.25])


def test_fit_shows_predictions_and_residuals():
    truth = torch.tensor([[6.0], [0.0], [3.0]])
    tensors = {"prediction": truth + 1, "target": truth}
    against, residuals = figures.draw_fit(tensors, {"targets": ["price"]}).axes
    assert against.collections[0].get_offsets().tolist() == [[6, 7], [0, 1], [3, 4]]
    assert residuals.collections[0].get_offsets()[:, 1].tolist() == [1, 1, 1]
    assert "1" in residuals.get_title() and residuals.get_ylabel() == "predicted - true price"


def test_mistakes_are_shown_in_colour_if_there_is_a_picture_of_them(tmp_path):
    run_dir = colours.make_run(tmp_path / "photos")
    tensors, metadata = saved(run_dir, "predictions")
    shown = tensors["shown"].tolist()
    worst, probability = figures.worst_mistakes(tensors)
    assert worst.tolist() == [40, 11] and probability[0] > probability[1]
    axes, *_ = figures.draw_mistakes(tensors, metadata["classes"]).axes
    assert axes.get_title() == f"predicted green, {probability[0]:.2%}\ntrue red"
    drawn = axes.images[0].get_array()
    assert (drawn == tensors["image"][shown.index(40)].permute(1, 2, 0).numpy()).all()
    assert (drawn[24, 24].argmax(), drawn.shape) == (1, (48, 48, 3))
    tensors["shown"], tensors["image"] = tensors["shown"][1:], tensors["image"][1:]
    assert figures.worst_mistakes(tensors)[0].tolist() == [11]


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


def test_chinese_is_drawn_where_a_font_of_the_list_is_installed(monkeypatch):
    """After matplotlib's own font, which all else is written in."""
    names = ["Other", "Noto Sans CJK JP", "DejaVu Sans"]
    monkeypatch.setattr(style.font_manager.fontManager, "get_font_names", lambda: names)
    assert style.as_written()["fontfamily"] == ["DejaVu Sans", "Noto Sans CJK JP"]


def test_what_goes_in_is_drawn_with_its_classes(tmp_path):
    """A picture of one colour in each of 12 places."""
    values = torch.arange(12, dtype=torch.float32)[:, None, None, None] * 20
    pictures = values.expand(12, 3, 40, 40)
    sides = {
        "to train on": (pictures, torch.arange(12) % 2),
        "to evaluate on": (pictures[:3], [1, 0, 1]),
    }
    path = figures.draw_seen(tmp_path, sides, ["a", "b"])
    with Image.open(path) as picture:
        drawn = np.asarray(picture.convert("L")).astype(int)
    for value, wanted in ((0, 2), (20, 2), (40, 2), (60, 1), (220, 1)):
        share = (np.abs(drawn - value) < 3).mean()
        assert 0.4 < share / wanted / 0.0235 < 2.5, (value, share)


def test_a_run_draws_what_the_network_sees_before_its_first_step(
    tiny_mnist, tmp_path, run_main, capsys
):
    flags = ["--dataset", tiny_mnist, "--stop-after-steps=1", "--run-dir", tmp_path / "run"]
    run_main("train_mnist", *flags, "--pictures")
    said, path = capsys.readouterr().out, tmp_path / "run" / "input.png"
    drawn_at = said.index(f"as the network sees them: {path}\n")
    assert said.index("run folder") < drawn_at < said.index("epoch  ") and path.exists()
    path.unlink()
    run_main("train_mnist", *flags, "--no-pictures")
    assert not path.exists() and "sees them" not in capsys.readouterr().out
