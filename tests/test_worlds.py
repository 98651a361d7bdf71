"""The scripts give the same numbers on 1, 2 and 3 processes, and the same bytes after a kill.

Their sizes are divided by nothing: the last batch of an epoch and of an evaluation has few samples,
so of three processes one or two have none. any_batch.py has in its batches whatever people have.
"""

import functools
import re
import signal
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import any_batch
import pytest
import torch
from conftest import assert_same_bytes, assert_same_numbers, first_pictures, rows, saved
from double import SAME
from faults import Outcome
from plain import plain_losses, quick

from trainkit.numbers.loaders import EpochBatches
from trainkit.numbers.orders import weighted

SMALL = "--batch-size 18 --eval-batch-size 27"  # of 109 samples: 7 steps
# With a smaller rate the network of a table may not be trusted after twelve steps.
TABLE = f"--data {{table}}/t.csv {SMALL} --learning-rate 0.02 --features a,b,c --target"
ENCODER = "--data {base}/lines.csv --base {base}/double --learning-rate 1e-3 --max-tokens 12"
PHOTOS = f"--dataset {{photos}}/data {SMALL} --size 32 --base {{photos}}/base"
# Of each run: its script, its flags, and how many samples it evaluates. Deep has dropout.
RUNS = {
    "train_mnist": (
        "train_mnist",
        f"{SMALL} --dataset {{digits}} --model deep --no-drop-last",
        55,
    ),
    "muon": (
        "train_mnist",
        f"{SMALL} --dataset {{digits}} --optimizer muon --weight-decay 0.1 --no-drop-last",
        55,
    ),
    "train_regression": (
        "train_regression",
        "--num-samples 234 --num-targets 2 --batch-size 36 --eval-batch-size 30",
        47,
    ),
    # It stops by itself.
    "any_batch": ("any_batch", "--batch-size 18 --stop-after-steps 99", any_batch.NUM_EVAL),
    "text": ("examples.text", f"{SMALL} --num-lines 109", 109),
    "gan": ("examples.gan", f"{SMALL} --dataset {{digits}}", 55),
    "two_towers": ("examples.two_towers", f"{SMALL} --dataset {{digits}}", 55),
    "pictures": ("examples.pictures", f"{PHOTOS} --balance", 27),
    "frozen": ("examples.pictures", f"{PHOTOS} --freeze", 27),
    "encoder": ("examples.text", f"{SMALL} {ENCODER}", 27),
    "tabm": ("examples.table", f"{TABLE} y", 27),
    "classes": ("examples.table", f"{TABLE} kind", 27),
}
NUM_STEPS, KILLED_AT, SAVE_EVERY = 12, 11, 5
BERT = "transformers.models.bert.modeling_bert"
MODULES = [BERT, "transformers.tokenization_utils_base", *["timm"] * bool(find_spec("timm"))]


@pytest.fixture(scope="session")
def start(nursery, request, tmp_path_factory):
    """Start one of RUNS, in float64."""
    data = {"digits": tmp_path_factory.mktemp("digits")}
    first_pictures(data["digits"], 109, 55)

    def call(name: str, run_dir: Path, world: int, *args: object, **plan: Any) -> Outcome:
        script, flags, _ = RUNS[name]
        for fixture in {*re.findall(r"{(\w+)}", flags)} - data.keys():
            data[fixture] = request.getfixturevalue(fixture)
        shared = f"--log-every 1 --stop-after-steps {NUM_STEPS} --no-pictures --timeout 60"
        flags = [*f"{shared} {flags}".format(**data).split(), "--run-dir", run_dir, *args]
        plan = {"world": world, "timeout": 200, "double": True, "modules": MODULES, **plan}
        return nursery.run(script, *flags, **plan)

    return call


@pytest.fixture(scope="session")
def whole(start, tmp_path_factory):
    """The folder of an undisturbed run, made once."""

    @functools.cache
    def call(name: str, world: int = 1, accumulate: int = 1) -> Path:
        run_dir = tmp_path_factory.mktemp(name) / "run"
        outcome = start(name, run_dir, world, "--accumulate", accumulate)
        assert outcome.codes == [0] * world, outcome.output
        assert f"  {world} process" in outcome.output
        assert not re.search("trainkit/.*Warning", outcome.output), outcome.output
        return run_dir

    return call


# A run, the number of processes, --accumulate.
WORLDS = [*product(RUNS, (1, 2, 3), (1, 3))]
WORLDS = [way for way in WORLDS if way[::2] != ("two_towers", 3)]  # its loss is of whole batches
# any_batch has masks, weights and shares of other sizes; gan has two optimizers, tabm an average.
QUICK = [("train_mnist", 2, 1), ("any_batch", 3, 3), ("gan", 2, 3), ("two_towers", 2, 1)]
QUICK += [("tabm", 2, 1), ("muon", 2, 3)]
KILLED = [("any_batch", 3, 3), ("muon", 2, 3)]


@pytest.mark.numeric
@pytest.mark.parametrize("name, world, accumulate", quick(WORLDS, QUICK))
def test_numbers_do_not_depend_on_processes_and_micro_batches(whole, name, world, accumulate):
    alone, run_dir = whole(name), whole(name, world, accumulate)
    assert_same_numbers(run_dir, alone)
    assert len(rows(run_dir, "steps")) == NUM_STEPS
    assert {row["eval_samples"] for row in rows(run_dir, "epochs")} == {RUNS[name][2]}
    for file in alone.glob("model*.safetensors"):
        here, there = (saved(folder, file.stem)[0] for folder in (run_dir, alone))
        assert here.get("scale", 1) > 0  # as far as the network of a table is trusted
        torch.testing.assert_close(here, there, atol=SAME, rtol=0)


@pytest.mark.parametrize("name, world, accumulate", quick(WORLDS, KILLED))
def test_a_kill_in_the_middle_of_an_epoch_changes_no_byte(
    start, whole, tmp_path, name, world, accumulate
):
    save = ["--save-every", SAVE_EVERY, "--accumulate", accumulate]
    fault = {"signal": [KILLED_AT, signal.SIGKILL]}
    killed = start(name, tmp_path / "run", world, *save, fault=fault)
    assert killed.codes[0] == -signal.SIGKILL and 0 not in killed.codes, killed.output
    again = start(name, tmp_path / "run", world, *save, "--resume", "auto")
    assert again.codes == [0] * world, again.output
    # The thread of the save at step 10 may have been killed with the process.
    assert re.search("resuming from .*step-00000000(05|10)", again.output), again.output
    undisturbed = whole(name, world, accumulate)
    names = [path.name for path in undisturbed.glob("*.safetensors")]
    assert "model.safetensors" in names
    assert_same_bytes(tmp_path / "run", undisturbed, *names)


def test_a_sharded_run_of_any_batch_gives_the_same_numbers(start, whole, tmp_path):
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert start("any_batch", tmp_path, 2, env=env).codes == [0, 0]
    assert_same_numbers(tmp_path, whole("any_batch"))


def test_a_run_with_other_weights_of_samples_is_another_one(start, whole):
    other = start("any_batch", whole("any_batch"), 1, "--power", 2, "--resume", "auto")
    assert "weights= or order=" in other.error(2)


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ("SIZES", "different trailing sizes in different processes, .*mask="),
        ("COUNT", r"count= of run.steps\(...\) and what run.step_mean\(...\) selects differ"),
    ],
)
def test_what_one_process_gives_otherwise_ends_all(start, tmp_path, wrong, sentence):
    """Sizes of values, or a number of tokens that is not that of the mask."""
    outcome = start("any_batch", tmp_path, 2, "--accumulate", 3, env={"WRONG": wrong})
    assert outcome.codes == [1, 1] and re.search(sentence, outcome.output), outcome.output
    assert "lost contact" not in outcome.output  # each process knows it by itself


@pytest.mark.usefixtures("float64_default")
def test_several_means_are_each_divided_by_what_its_own_mask_or_weights_select(whole):
    torch.manual_seed(0)
    model = any_batch.Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    means = []

    def loss_of(indices: torch.Tensor) -> torch.Tensor:
        batch = any_batch.collate([any_batch.make_sample(n) for n in indices.tolist()])
        values = any_batch.compute_losses(model, batch)
        weights = values["weights"]["loss_size"]
        size = (weights * values["loss_size"]).sum() / weights.sum()
        of_step = values["loss"][values["mask"]["loss"]].mean(), size, values["loss_plain"].mean()
        means.append([mean.item() for mean in of_step])
        return sum(of_step)

    order = weighted(any_batch.WEIGHTS, any_batch.NUM_TRAIN, 0)
    batches = EpochBatches(any_batch.NUM_TRAIN, 18, seed=0, order=order)
    plain_losses(batches, optimizer, range(3), loss_of)
    names = "train_loss", "train_loss_size", "train_loss_plain"
    for row, step in zip(rows(whole("any_batch"), "steps"), means, strict=True):
        assert [row[name] for name in names] == pytest.approx(step, rel=SAME)
