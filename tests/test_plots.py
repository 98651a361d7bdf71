"""The numbers behind each picture, and pictures that the files of a run folder alone give again."""

import json
from pathlib import Path

import colours
import pytest
import torch
from conftest import rows, saved
from PIL import Image

from trainkit.tools import curves, plots

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
    matrix = plots.confusion_matrix(tensors["prediction"], tensors["target"], 10)
    assert matrix.sum() == 101 and matrix.trace() == round(accuracy * 101)
    axes = plots.draw_confusion(tensors, metadata["classes"]).axes[0]
    assert sum(int(text.get_text().split("\n")[0]) for text in axes.texts) == 101
    assert f"of 101 right ({accuracy:.2%})" in axes.get_title()


def test_confusion_of_300_classes_is_a_picture_of_the_usual_size():
    target = torch.arange(300)
    figure = plots.draw_confusion({"prediction": target, "target": target}, [*"abc"] * 100)
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


def test_fit_shows_predictions_residuals_and_for_one_feature_the_line():
    feature = torch.tensor([[2.0], [0.0], [1.0]])
    tensors = {"prediction": 3 * feature + 1, "target": 3 * feature, "feature": feature}
    metadata = {"targets": ["price"], "feature": "area"}
    against, residuals, line = plots.draw_fit(tensors, metadata).axes
    assert against.collections[0].get_offsets().tolist() == [[6, 7], [0, 1], [3, 4]]
    assert residuals.collections[0].get_offsets()[:, 1].tolist() == [1, 1, 1]
    assert "1" in residuals.get_title() and residuals.get_ylabel() == "predicted - true price"
    assert line.lines[0].get_xydata().tolist() == [[0, 1], [1, 4], [2, 7]]
    assert line.get_xlabel() == "area"


def test_mistakes_are_shown_in_colour_if_there_is_a_picture_of_them(tmp_path):
    run_dir = colours.make_run(tmp_path / "photos")
    tensors, metadata = saved(run_dir, "predictions")
    shown = tensors["shown"].tolist()
    worst, probability = plots.worst_mistakes(tensors)
    assert worst.tolist() == [40, 11] and probability[0] > probability[1]
    axes, *_ = plots.draw_mistakes(tensors, metadata["classes"]).axes
    assert axes.get_title() == f"predicted green, {probability[0]:.2%}\ntrue red"
    drawn = axes.images[0].get_array()
    assert (drawn == tensors["image"][shown.index(40)].permute(1, 2, 0).numpy()).all()
    assert (drawn[24, 24].argmax(), drawn.shape) == (1, (48, 48, 3))
    tensors["shown"], tensors["image"] = tensors["shown"][1:], tensors["image"][1:]
    assert plots.worst_mistakes(tensors)[0].tolist() == [11]
