"""A model spread over the processes (FSDP2) trains, saves and resumes like one that is not."""

import pickle
import shutil
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, refused, rows, saved, split_flags
from faults import digests
from loops import HEAD
from safetensors.torch import load_file
from saving import reforge
from sharded import SHARDED, env, train

from trainkit.checkpoints import sharded as shards

CLOSE = 1e-6  # between losses of float32 runs that add up in different orders
FLAGS = "--num-samples 375 --model mlp --hidden 128,128 --batch-size 60 --epochs 2 --log-every 1 "
FLAGS += "--save-every 2 --keep 9 --clip-norm inf --timeout 20 --no-pictures --resume auto"
SMALL = FLAGS.split()
LAST = 10  # steps of it, five per epoch


@pytest.fixture(scope="module")
def runs(nursery, tmp_path_factory):
    """An undisturbed run of each kind; None: without sharding."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in (None, SHARDED):
        train(nursery, folder / str(kind), *SMALL, kind=kind)
    return {kind: folder / str(kind) for kind in (None, SHARDED)}


def copy_until(source: Path, target: Path, step: int) -> Path:
    """The run folder as it was after the checkpoint of that step."""
    shutil.copytree(source, target)
    for path in target.glob("checkpoints/step-*"):
        if path.name > f"step-{step:010d}":
            shutil.rmtree(path)
    return target


def assert_close(one: Path, other: Path, tolerance: float = CLOSE):
    """`one` has the rows of `other`; it may have been evaluated more often."""
    found = {(row["step"], "eval_loss" in row): row for row in rows(one)}
    for row in rows(other):
        assert found[row["step"], "eval_loss" in row] == pytest.approx(row, abs=tolerance)


def assert_same_rows(sharded, unsharded):
    """The norm of shards is that of their norms, which rounds in another order."""
    for row, same in zip(sharded, unsharded, strict=True):
        norms = row.pop("grad_norm", 0.0), same.pop("grad_norm", 0.0)
        assert row == same and norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_a_sharded_run_has_the_bytes_of_an_unsharded_one_of_which_each_process_writes_its_share(
    runs,
):
    assert_same_rows(rows(runs[SHARDED]), rows(runs[None]))
    ours, theirs = (runs[kind] / "model.safetensors" for kind in (SHARDED, None))
    assert ours.read_bytes() == theirs.read_bytes()
    state = runs[SHARDED] / "checkpoints" / f"step-{LAST:010d}" / "state"
    shares = [path.stat().st_size for path in state.glob("shard-*")]
    # Weights, and two moments of each.
    assert len(shares) == 2 and max(shares) < 0.53 * 3 * ours.stat().st_size


def test_any_kind_of_run_continues_from_any_other_with_equal_bytes(nursery, runs, tmp_path):
    where = copy_until(runs[SHARDED], tmp_path / "run", 2)
    for step, kind in ((6, None), (LAST, SHARDED)):
        train(nursery, where, *SMALL, "--stop-after-steps", step, kind=kind)
    assert_same_rows(rows(where, "steps"), rows(runs[None], "steps"))
    found, expected = digests(where), digests(runs[SHARDED])
    assert {**found, "metrics.jsonl": ""} == {**expected, "metrics.jsonl": ""}  # more evaluations


def test_average_accumulation_clipping_and_the_best_weights_are_those_of_an_unsharded_run(
    nursery, arguments, tmp_path
):
    """On other numbers of processes and copies, too."""
    flags = "--ema 0.8 --accumulate 2 --clip-norm 0.05 --keep-best eval_loss --eval-every 2 "
    flags += "--resume auto --batch-size 72 --optimizer muon"  # of which one matrix is hidden
    args = [*arguments["train_regression"], *flags.split()]
    copies = {"world": 4, "copies": 2}
    plans = [
        (2, SHARDED, copies),
        (6, None, {"world": 1}),
        (LAST, SHARDED, {"world": 2}),
    ]
    for step, kind, world in plans:
        more = [*args, "--stop-after-steps", step]
        train(nursery, tmp_path / "sharded", *more, kind=kind, **world, double=True)
        if "copies" in world:  # which save each row once
            state = tmp_path / "sharded" / "checkpoints" / f"step-{step:010d}" / "state"
            shares = [load_file(path) for path in state.glob("shard-*")]
            sizes = Counter({n: 0 for share in shares for n in share})
            for share in shares:
                sizes.update({name: piece.numel() for name, piece in share.items()})
            weights, _ = saved(tmp_path / "sharded")
            assert len(shares) == 2
            for name, weight in weights.items():
                assert sizes[f"model.{name}"] == sizes[f"average.{name}"] == weight.numel()
    train(nursery, tmp_path / "one", *args, world=1, double=True)
    assert_close(tmp_path / "sharded", tmp_path / "one", tolerance=1e-9)
    for name in ("model", "raw", "best"):
        (ours, metadata), (theirs, _) = (saved(tmp_path / x, name) for x in ("sharded", "one"))
        assert metadata["script"] == "train_regression" and ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert torch.allclose(value, theirs[key], rtol=0, atol=1e-6), (name, key)


def test_channels_last_weights_and_batchnorm_are_sharded_and_come_back(
    nursery, arguments, tmp_path
):
    """A sharded run goes on without sharding, its convolutions in another layout."""
    args = [*arguments["train_mnist"], "--model", "normed", "--resume", "auto"]
    plan = {"script": "train_mnist", "double": True}
    train(nursery, tmp_path / "whole", *args, **plan)
    for step, kind in ((4, SHARDED), (LAST, None)):
        train(nursery, tmp_path / "run", *args, "--stop-after-steps", step, kind=kind, **plan)
    assert_close(tmp_path / "run", tmp_path / "whole", tolerance=1e-9)


@pytest.mark.parametrize(
    "script, flags, copies",
    [
        ("train_regression", f"{FLAGS} --start-from {{weights}}", 1),  # weights of a file
        pytest.param("examples.text", "--num-lines 7 --batch-size 6", 1, marks=pytest.mark.slow),
    ],
)
def test_what_once_failed_when_it_was_sharded_has_the_loss_of_an_unsharded_run(
    nursery, runs, tmp_path, script, flags, copies
):
    flags = flags.format(weights=runs[None] / "model.safetensors")
    args = f"--timeout 30 --no-pictures --log-every 1 --stop-after-steps 4 {flags}".split()
    for kind in (None, SHARDED):
        plan = {"world": 2 * copies, "copies": copies} if kind else {"world": 1}
        train(nursery, tmp_path / str(kind), *args, script=script, kind=kind, **plan)
    assert_close(tmp_path / "None", tmp_path / SHARDED, 1e-5)


TWICE = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}
LAYERS = "--layers 2 --width 32 --num-bytes 9000 --batch-size 24 --dropout 0.3 --ema 0.8 --keep 9 "
LAYERS += "--save-every 2 --stop-after-steps 4 --no-pictures --resume auto"


def test_layers_that_are_computed_twice_have_the_same_dropout_and_names(nursery, tmp_path):
    layer = {"FSDP_TRANSFORMER_CLS_TO_WRAP": "TransformerEncoderLayer"}
    plan = {"script": "examples.gpt", "kind": SHARDED}
    train(nursery, tmp_path / "once", *LAYERS.split(), **plan, env=layer)
    where = copy_until(tmp_path / "once", tmp_path / "run", 2)
    train(nursery, where, *LAYERS.split(), **plan, env=layer | TWICE)
    assert digests(where) == digests(tmp_path / "once")


def test_a_model_made_by_the_first_process_is_that_of_an_unsharded_run(nursery, tmp_path):
    """Tied, frozen and shared weights, random buffers and attributes, and numbers drawn later."""
    for kind in (None, SHARDED):
        train(nursery, tmp_path / str(kind), *SMALL, script="made", kind=kind, double=True)
    assert_close(tmp_path / "None", tmp_path / SHARDED, 1e-9)
    (ours, _), (theirs, _) = (saved(tmp_path / str(kind), "start") for kind in (None, SHARDED))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize(
    "script, args, variables, words",
    [
        ("examples.gpt", LAYERS.split(), TWICE, "finds no layer to compute twice"),
        ("train_mnist", ["--model", "wide", "--dataset"], TWICE, "draws once"),  # our Dropout
        ("made", SMALL, {"READS": "1"}, "error: shards.make(...) cannot build this model"),
    ],
)
def test_layers_that_cannot_be_computed_twice_or_are_read_while_they_are_built_are_refused(
    nursery, tiny_mnist, tmp_path, script, args, variables, words
):
    args = [*args, *[tiny_mnist] * (script == "train_mnist"), "--run-dir", tmp_path / "run"]
    outcome = nursery.run(script, *args, world=2, env=env(SHARDED, **variables))
    assert outcome.codes == [2, 2] and outcome.output.count(words) == 1, outcome.output


def test_weights_that_cannot_be_written_leave_no_process_waiting(nursery, runs, tmp_path):
    where = copy_until(runs[SHARDED], tmp_path / "run", 8)
    (where / ".tmp-model.safetensors").mkdir()
    outcome = train(nursery, where, *SMALL, kind=SHARDED, codes=[1, 1])
    assert outcome.output.count("model.safetensors cannot be written") == 1, outcome.output


# What is refused.


@pytest.mark.parametrize(
    "changes, world",
    [
        ({"FSDP_VERSION": "1"}, {}),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, {}),
        ({}, {"mixed_precision": "fp16"}),
        ({}, {"num_processes": 1}),
    ],
)
def test_what_would_silently_train_something_else_is_refused(monkeypatch, changes, world):
    for key, given in env(SHARDED, **changes).items():
        monkeypatch.setenv(key, given)
    launched = SimpleNamespace(**{"num_processes": 2, "mixed_precision": "no"} | world)
    with refused("sharded weights need fsdp_version: 2, several"):
        shards.shard(launched)


def test_optimizers_in_another_order_than_their_models_come_back_in_any_run(
    nursery, tiny_mnist, tmp_path
):
    """A checkpoint numbers them as accelerator.prepare got them. Two models, each sharded alone."""
    script = (ROOT / "examples" / "gan.py").read_text()
    for old, new in (
        ("*optimizers, *schedulers,", "*optimizers[::-1], *schedulers[::-1],"),
        ("rest[:2], rest[2:]", "rest[1::-1], rest[:1:-1]"),
    ):
        assert script.count(old) == 1
        script = script.replace(old, new)
    (tmp_path / "gan.py").write_text(script)
    args = f"--dataset {tiny_mnist} --log-every 1 --eval-every 2 --save-every 2 --timeout 30 "
    args += "--no-pictures --resume auto --stop-after-steps"
    plan = {"script": str(tmp_path / "gan.py")}
    train(nursery, tmp_path / "one", *args.split(), 6, world=1, **plan)
    for step, kind in ((2, SHARDED), (4, None), (6, SHARDED)):
        train(nursery, tmp_path / "run", *args.split(), step, kind=kind, **plan)
    assert_close(tmp_path / "run", tmp_path / "one", 1e-5)


@pytest.mark.parametrize("damage", ["missing", "pickle"])
def test_a_share_that_does_not_fit_ends_in_one_sentence(nursery, runs, tmp_path, damage):
    """Even if the manifest knows the file."""
    where = copy_until(runs[SHARDED], tmp_path / "run", 8)
    path = where / "checkpoints" / "step-0000000008"
    _, last = sorted((path / "state").glob("shard-*"))
    if damage == "missing":
        last.unlink()
    else:
        last.write_bytes(pickle.dumps(print))
    reforge(path)
    args = [*SMALL, "--resume", path]
    outcome = train(nursery, where, *args, world=1, codes=[2])
    assert outcome.output.count("\nerror:") == 1, outcome.output


# What is frozen.


def test_a_killed_run_ends_with_equal_bytes_and_its_checkpoints_hold_nothing_frozen(
    nursery, tmp_path
):
    args = [*SMALL, "--hidden", "400,400", "--keep", 2, "--ema", 0.9, "--keep-best", "eval_loss"]
    plan = {"script": "adapted", "kind": SHARDED}
    kill = {"rank": 1, "signal": [6, signal.SIGKILL]}
    codes = [1, -signal.SIGKILL]
    ended = train(nursery, tmp_path / "run", *args, **plan, fault=kill, codes=codes)
    assert "error: process 0 lost contact with another process of this run" in ended.stderr
    for name in ("run", "whole"):
        train(nursery, tmp_path / name, *args, **plan)
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")
    sizes = [path.stat().st_size for path in tmp_path.glob("run/**/*") if path.is_file()]
    assert sum(sizes) < 400 * 400 * 4 * 0.5
    for name in ("model", "raw", "best"):
        assert not any(weight.startswith("base.") for weight in saved(tmp_path / "run", name)[0])
    changed = train(nursery, tmp_path / "run", *args, **plan, env={"BASE": "$RANK"}, codes=[2, 2])
    assert "processes of this run differ: the frozen weight base.0.weight " in changed.output
    assert changed.output.count("error:") == 1


TEACHER = (
    HEAD
    + """
import copy


def load_data(config):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    return InMemory(x[:48]), InMemory(x[48:])


@torch.no_grad()
def follow(teacher, student):
    for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
        t.mul_(0.5).add_(s, alpha=0.5)


def main(argv=None):
    config = parse(Config, argv)
    with Run(config, "teacher") as run:
        accelerator = run.accelerator
        loaders = make_loaders(accelerator, *run.load(load_data), config)
        student = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3))
        teacher = copy.deepcopy(student).requires_grad_(False).eval()
        optimizer = make_optimizer(accelerator, student.parameters(), config)
        *both, optimizer, train, evaluate = accelerator.prepare(
            student, teacher, optimizer, *loaders
        )
        run.begin(both, {})

        def losses(x):
            return (both[0](x) - teacher(x).detach() - 1).square().mean(1)

        for _ in run.epochs():
            for x, _ in run.steps(train):
                with accelerator.accumulate(both[0]):
                    loss = losses(x)
                    accelerator.backward(run.step_mean(loss))
                    optimizer.step()
                    optimizer.zero_grad()
                assert not teacher.training
                follow(teacher, student)
                run.add(loss=loss)
                if run.end_step():
                    run.save()
            run.end_epoch(run.evaluate(evaluate, lambda batch: {"loss": losses(batch[0])}))
        run.finish()
"""
)


def test_a_teacher_that_is_prepared_follows_its_student_in_every_world(nursery, tmp_path):
    path = tmp_path / "teacher.py"
    path.write_text(TEACHER)
    flags = split_flags(["--batch-size 12 --epochs 2 --save-every 1 --log-every 1 --no-pictures"])
    train(nursery, tmp_path / "one", *flags, script=str(path), world=1)
    for step in (3, LAST):
        more = ["--stop-after-steps", step, "--resume", "auto"]
        train(nursery, tmp_path / "run", *flags, *more, script=str(path), kind=SHARDED)
    for name in ("model", "model_1"):
        (ours, _), (single, _) = (saved(tmp_path / run, name) for run in ("run", "one"))
        assert ours.keys() == single.keys()
        for key, value in single.items():
            assert torch.allclose(ours[key], value, rtol=0, atol=1e-6), (name, key)
    assert_close(tmp_path / "run", tmp_path / "one")
