"""What a terminal shows: a bar with an honest time, and a table of 80 columns."""

import re
import sys
from types import SimpleNamespace

from trainkit.numbers.orders import Progress
from trainkit.run.reporter import MetricsTable, Reporter, show_best

LEFT = re.compile(r"epoch (\d)/3 +(\d+) %\|.*\| (\S+) left")


def test_the_time_left_is_that_of_this_process_with_its_evaluations(monkeypatch, capsys):
    """Resumed in mid-epoch, at step 150 of 300: what was done before says nothing of the speed."""
    clock = [1000.0]  # it stands still until it is moved
    for name in ("tqdm.std.time", "time.perf_counter"):
        monkeypatch.setattr(name, lambda: clock[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    config = SimpleNamespace(epochs=3, keep_best=None)
    shown = Reporter(SimpleNamespace(is_main_process=True), config, None)

    def last():
        """Epoch, percent and time that the bar showed last."""
        return LEFT.findall(capsys.readouterr().err)[-1]

    shown.start(Progress(epoch=1, step=150), 50, 300)
    assert "? left" in capsys.readouterr().err  # not 00:00
    clock[0] += 1
    shown.bar.update()
    assert last() == ("2", "50", "02:29")  # 149 steps at a second each
    clock[0] += 1
    shown.bar.update()
    shown.stop()
    clock[0] += 6  # an evaluation
    shown.start(Progress(epoch=1, step=152), 52, 300)
    clock[0] += 2
    shown.bar.update(3)
    assert last() == ("2", "51", "04:50")  # 5 steps took 10 s, 145 are left
    shown.bar.close()


METRICS = {"epoch": 1, "train_loss": 0.1, "eval_loss": 0.2, "eval_mse": 3.502e8}
METRICS |= {"eval_rmse": 18713.2, "eval_mae": 1.0, "eval_r2": 0.9812, "eval_samples": 10}


def test_a_table_fits_and_says_first_what_a_person_reads_first():
    table = MetricsTable(None)
    head, row = table.line("10/10", METRICS, 12.3, 123456).splitlines()
    assert len(head) == len(row) < 80
    names = "epoch train_loss eval_loss eval_rmse eval_r2 seconds samples/s"
    assert " ".join(head.split()) == names
    assert " ".join(row.split()) == "10/10 0.1 0.2 18,713 0.9812 12.3 123,456"
    assert len(table.line("2/10", {"eval_loss": 0.2}, 1, 1)) == len(row)
    assert show_best(METRICS, None) == "eval_rmse 18,713, eval_r2 0.9812"
    assert show_best({"eval_loss": 0.2, "eval_accuracy": 0.99974}, None).startswith(
        "eval_accuracy 99.97 %"
    )


def test_the_metric_of_keep_best_is_in_the_table_and_in_the_last_line():
    head = MetricsTable("eval_gap:min").line("1/1", {**METRICS, "eval_gap": 0.3}, 1, 1)
    assert head.split()[:4] == ["epoch", "train_loss", "eval_loss", "eval_gap"]
    assert show_best({**METRICS, "eval_gap": 0.3}, "eval_gap:min").startswith("eval_gap 0.3, ")
