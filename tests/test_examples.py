"""The scripts of examples/: the same numbers on 1, 2 and 3 processes, and after a kill.

Their sizes are divided by nothing: the last batch of an epoch and of an evaluation has one sample,
so of three processes two have none.
"""

import ast
import functools
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, first_pictures, rows, run
from faults import Outcome
from test_colour import fill

SMALL = "--batch-size 12 --eval-batch-size 27 --epochs 3"  # of 109 samples: 10 steps
PHOTOS = ["--size", "32", "--resize", "36", "--base"]
FLAGS = {
    "text": f"{SMALL} --num-lines 109".split(),
    "gan": SMALL.split(),
    "two_towers": SMALL.split(),
    "pictures": [*SMALL.split(), "--mix", "cutmix", "--balance", *PHOTOS],
    "frozen": [*SMALL.split(), "--freeze", *PHOTOS],
}
NUM_EVALUATED = {"text": 109, "gan": 55, "pictures": 27, "frozen": 27}
NUM_STEPS, KILLED_AT, SAVE_EVERY = 30, 17, 5

Start = Callable[..., Outcome]


@pytest.fixture(scope="module")
def digits(datasets_cache, tmp_path_factory):
    """A folder with 109 pictures to train on and 55 to evaluate on."""
    return first_pictures(tmp_path_factory.mktemp("digits"), 109, NUM_EVALUATED["gan"])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """137 colour pictures in two classes, and a small network of timm with BatchNorm."""
    timm, folder = pytest.importorskip("timm"), tmp_path_factory.mktemp("photos")
    parts = ["train"] * 110 + ["test"] * 27
    fill(folder / "data", *(f"{part}/class {n % 2}/{n}.png" for n, part in enumerate(parts)))
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", pretrained=False)
    timm.models.save_for_hf(network, folder / "base", safe_serialization=True)
    return folder


@pytest.fixture(scope="module")
def start(nursery, digits, photos):
    """Start an example."""

    def call(name: str, run_dir: Path, world: int, *args: object, **plan: Any) -> Outcome:
        script, data = name, ["--dataset", digits] if name in ("gan", "two_towers") else []
        if name in ("pictures", "frozen"):
            data, script = [photos / "base", "--dataset", photos / "data"], "pictures"
        flags = f"--log-every 1 --stop-after-steps {NUM_STEPS} --no-pictures --timeout 60".split()
        flags += ["--run-dir", run_dir]
        words = [*FLAGS[name], *data, *flags, *args]
        return nursery.run(f"examples.{script}", *words, world=world, timeout=200, **plan)

    return call


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """The folder of an undisturbed run, made once."""

    @functools.cache
    def call(name: str, world: int, accumulate: int) -> Path:
        run_dir = tmp_path_factory.mktemp(name) / "run"
        outcome = start(name, run_dir, world, "--accumulate", accumulate)
        assert outcome.codes == [0] * world, outcome.output
        assert f"  {world} process" in outcome.output
        return run_dir

    return call


def by_example(**quick: set[int]) -> list[Any]:
    """(example, world), 1, 2 and 3 processes; those that are not quick run with `-m slow`."""
    marks = {
        (name, world): [pytest.mark.slow] * (world not in quick[name])
        for name in quick
        for world in (1, 2, 3)
    }
    return [pytest.param(*case, marks=mark) for case, mark in marks.items()]


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("name", "world"), by_example(text={3}, gan={2}, pictures={3}, frozen=set())
)
def test_losses_do_not_depend_on_processes_and_micro_batches(whole, name, world, accumulate):
    expected, found = rows(whole(name, 1, 1)), rows(whole(name, world, accumulate))
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    assert sum("learning_rate" in row for row in found) == NUM_STEPS
    for row, other in zip(expected, found, strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-5), row["step"]
    evaluations = [row["eval_samples"] for row in found if "eval_loss" in row]
    assert evaluations == [NUM_EVALUATED[name]] * 3


@pytest.mark.parametrize(
    ("name", "world"),
    by_example(text=set(), gan={2}, pictures={2}, frozen={1}, two_towers=set()),
)
def test_a_kill_in_the_middle_of_an_epoch_changes_no_byte(start, whole, tmp_path, name, world):
    accumulate = 1 + (name == "gan")
    run_dir, save = tmp_path / "run", ["--save-every", SAVE_EVERY, "--accumulate", accumulate]
    fault = {"signal": [KILLED_AT, signal.SIGKILL]}
    killed = start(name, run_dir, world, *save, fault=fault)
    assert killed.codes[0] == -signal.SIGKILL and 0 not in killed.codes, killed.output
    again = start(name, run_dir, world, *save, "--resume", "auto")
    assert again.codes == [0] * world, again.output
    # The thread of the save at step 15 may have been killed with the process.
    assert re.search("resuming from .*step-00000000(10|15)", again.output), again.output
    undisturbed = whole(name, world, accumulate)
    names = [path.name for path in undisturbed.glob("*.safetensors")]
    assert "model.safetensors" in names
    for file in ("metrics.jsonl", *names):
        assert (run_dir / file).read_bytes() == (undisturbed / file).read_bytes(), file


def test_an_example_starts_where_it_lies(tmp_path):
    """From any folder, without anything installed or exported."""
    flags = ["--run-dir", tmp_path / "run", "--stop-after-steps", 1, "--no-pictures"]
    result = run("examples/text.py", *FLAGS["text"], *flags, cwd=tmp_path, env={"PYTHONPATH": ""})
    assert result.returncode == 0, result.stderr


def test_the_five_edits_of_the_docs_make_a_script_that_learns(nursery, tmp_path):
    """What docs/your_own.md shows is done to a copy of examples/text.py."""
    docs = (ROOT / "docs" / "your_own.md").read_text()
    script = (ROOT / "examples" / "text.py").read_text()
    script = script.replace("import Run,", "import InMemory, Run,")
    blocks = re.findall(r"```python\n(?:@dataclass\n)?(def|class) (\w+)(.*?)```", docs, re.DOTALL)
    blocks = [block for block in blocks if re.search(rf"^(def|class) {block[1]}\b", script, re.M)]
    assert len(blocks) == 4
    for kind, name, text in blocks:
        old = re.compile(rf"^(?:def|class) {name}\b.*?(?=\n\n\n)", re.DOTALL | re.MULTILINE)
        (found,) = old.findall(script)
        script = script.replace(found, f"{kind} {name}{text.rstrip()}")
    (lines,) = re.findall(r"```diff\n(.*?)```", docs, re.DOTALL)
    changes = re.findall(
        r"^-(.*)\n(?:\+(.*)\n)?", lines, re.MULTILINE
    )  # a line may only be left out
    assert sum(1 + bool(new) for _, new in changes) == len(lines.splitlines())
    for old, new in changes:
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    (tmp_path / "rows.py").write_text(script)
    flags = ["--run-dir", tmp_path / "run", "--no-pictures"]
    outcome = nursery.run(tmp_path / "rows.py", *flags, world=2, timeout=200)
    assert outcome.codes == [0, 0], outcome.output
    assert rows(tmp_path / "run")[-1]["eval_accuracy"] > 0.8


def test_an_example_stays_on_a_few_pages():
    for path in (ROOT / "examples").glob("*.py"):
        source = path.read_text()
        for node in ast.parse(source).body:
            if getattr(node, "name", "") == "main":
                assert len(source.splitlines()) <= 150, path
                assert node.end_lineno - node.lineno < 50, path
