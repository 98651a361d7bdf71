"""The Ray commands of docs/scaling.md, on a cluster of two nodes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import conftest
import pytest
from faults import digests

from trainkit.errors import EXIT_FAILURE, EXIT_USAGE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    """A head without work and two nodes with a CPU each."""
    utils = pytest.importorskip("ray.cluster_utils", exc_type=ImportError)
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else a token is written to the home folder
    started = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    os.environ["RAY_ADDRESS"] = started.address
    started.nodes = [started.add_node(num_cpus=1) for _ in range(2)]
    yield started
    started.shutdown()
    del os.environ["RAY_AUTH_MODE"], os.environ["RAY_ADDRESS"]


def start(run_dir: Path, retries: int, flags: str) -> subprocess.Popen:
    """The command of the page, with these flags besides; what it prints goes to RUN_DIR.log."""
    words = conftest.typed("python -m trainkit.tools.ray")
    words[3:3] = ["--retries", str(retries)]
    words[words.index("runs/mnist")] = str(run_dir)
    with open(f"{run_dir}.log", "w") as log:  # a pipe that nobody reads fills up and stops Ray
        command = [sys.executable, *words[1:], *flags.split()]
        return subprocess.Popen(command, cwd=conftest.ROOT, stdout=log, stderr=log)


def test_a_refusal_is_said_once_and_a_disturbed_run_ends_with_the_bytes_of_an_undisturbed_one(
    cluster, undisturbed, tiny_mnist, tmp_path
):
    assert start(tmp_path / "refused", 9, "--batch-size 3").wait(120) == EXIT_USAGE
    assert (tmp_path / "refused.log").read_text().count("error: --batch-size 3 must") == 1
    run_dir = tmp_path / "run"
    launched = start(run_dir, 0, f"{conftest.ENGINE_FLAGS} {tiny_mnist}")
    conftest.wait_for_step(run_dir, 20, launched)
    conftest.find_process(run_dir).terminate()
    assert launched.wait(120) == EXIT_FAILURE
    launched = start(run_dir, 9, f"{conftest.ENGINE_FLAGS} {tiny_mnist}")
    try:
        conftest.wait_for_step(run_dir, 50, launched)
        conftest.find_process(run_dir).terminate()
        conftest.wait_for_step(run_dir, 100, launched)
        conftest.find_process(run_dir).parent().kill()
        conftest.wait_for_step(run_dir, 170, launched)
        cluster.remove_node(cluster.nodes[1], allow_graceful=False)
        cluster.add_node(num_cpus=1)
        assert launched.wait(240) == 0
    finally:
        launched.kill()
    assert (tmp_path / "run.log").read_text().count("resuming from") == 4
    assert digests(run_dir) == digests(undisturbed)
    from ray.train import Result

    kept = max((tmp_path / "run.ray").glob("ray_train_run-*"))
    evaluated = Result.from_path(kept).metrics_dataframe["eval_loss"].tolist()
    assert evaluated[-60:] == [row["eval_loss"] for row in conftest.rows(run_dir, "epochs")]


def test_the_sweep_of_the_page_prints_a_table_by_the_metric_of_keep_best(
    cluster, tiny_mnist, tmp_path
):
    page = (conftest.ROOT / "docs" / "scaling.md").read_text()
    program = page.split("```python\n")[1].split("```")[0]
    for old, new in {
        "runs/sweep": str(tmp_path / "sweep"),
        "SWEEP.parents[1]": repr(str(conftest.ROOT)),
        '["compact", "lenet"]': '["lenet"]',
        '"train_mnist.py",': f'"train_mnist.py", "--dataset", "{tiny_mnist}",',
    }.items():
        assert old in program
        program = program.replace(old, new)
    done = conftest.run("-c", program, timeout=240)
    printed = [line.split() for line in done.stdout.splitlines()]
    head = printed.index(["config/--model", "config/--learning-rate", "epoch", "eval_accuracy"])
    accuracies = [float(cells[-1]) for cells in printed[head + 1 : head + 4]]
    # A trial that the scheduler ends may make another evaluation before its process has gone.
    logs, reports = tmp_path.glob("sweep/*/metrics.jsonl"), tmp_path.rglob("result.json")
    made = {row["eval_accuracy"] for log in logs for row in conftest.rows(log.parent, "epochs")}
    lines = [json.loads(line) for path in reports for line in path.read_text().splitlines()]
    reported = {line["eval_accuracy"] for line in lines}
    assert accuracies == sorted(accuracies, reverse=True) and reported <= made
    assert accuracies[0] == pytest.approx(max(reported), abs=1e-5)
