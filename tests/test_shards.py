"""A model spread over the processes (FSDP2) trains, saves and resumes like one that is not."""

import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from conftest import CONFIGS, rows, saved
from faults import Nursery, Outcome, digests
from safetensors.torch import load_file, save_file
from test_checkpoint import reforge

from trainkit import shards
from trainkit.errors import UsageError

CLOSE = 1e-6  # between losses of float32 runs that add up in different orders
KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
SMALL = ["--num-samples", 375, "--model", "mlp", "--hidden", "128,128", "--batch-size", 60]
SMALL += ["--epochs", 2, "--log-every", 1, "--save-every", 2, "--keep", 9, "--clip-norm", "inf"]
SMALL += ["--timeout", 20, "--no-pictures", "--resume", "auto"]
LAST = 10  # steps of it, five per epoch


def env(kind: str | None, **changes: str) -> dict[str, str]:
    """What the launcher hands on of 2cpu_fsdp.yaml, with this fsdp_state_dict_type; None: DDP."""
    if kind is None:
        return changes
    config = yaml.safe_load((CONFIGS / "2cpu_fsdp.yaml").read_text())["fsdp_config"]
    config |= {"fsdp_state_dict_type": kind}
    found = {name.upper(): str(value).lower() for name, value in config.items()}
    return {"ACCELERATE_USE_FSDP": "true", **found, **changes}


def train(
    nursery: Nursery,
    where: Path,
    *args: object,
    kind: str | None = None,
    world: int = 2,
    script: str = "train_regression",
    codes: list[int] | None = None,
    **plan: Any,
) -> Outcome:
    variables = env(kind, **plan.pop("env", {}))
    outcome = nursery.run(script, *args, "--run-dir", where, world=world, env=variables, **plan)
    assert outcome.codes == (codes or [0] * world), outcome.output
    world_line = outcome.output.splitlines()[0]
    assert f"{world} process" in world_line and ("sharded" in world_line) == (kind is not None)
    return outcome


@pytest.fixture(scope="module")
def runs(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """An undisturbed run of each kind; None: without sharding."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in (None, *KINDS):
        train(nursery, folder / str(kind), *SMALL, kind=kind)
    return {kind: folder / str(kind) for kind in (None, *KINDS)}


def copy_until(source: Path, target: Path, step: int) -> Path:
    """The run folder as it was after the checkpoint of that step."""
    shutil.copytree(source, target)
    for path in target.glob("checkpoints/step-*"):
        if path.name > f"step-{step:010d}":
            shutil.rmtree(path)
    return target


def assert_equal_bytes(one: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def assert_close(one: Path, other: Path, tolerance: float = CLOSE) -> None:
    """All losses of the steps are equal but for `tolerance`, and so are those of the last epoch."""
    pairs = [*zip(rows(one, "steps"), rows(other, "steps"), strict=True)]
    for a, b in [*pairs, (rows(one, "epochs")[-1], rows(other, "epochs")[-1])]:
        assert a == pytest.approx(b, abs=tolerance), a["step"]


def test_a_sharded_run_has_the_bytes_of_an_unsharded_one(runs: dict[str | None, Path]) -> None:
    assert len(rows(runs[None], "steps")) == LAST
    for kind in KINDS:
        assert_equal_bytes(runs[kind], runs[None])


def test_with_sharded_state_every_process_writes_its_share(runs: dict[str | None, Path]) -> None:
    sizes = {}
    for kind in KINDS:
        state = runs[kind] / "checkpoints" / f"step-{LAST:010d}" / "state"
        sizes[kind] = [path.stat().st_size for path in state.iterdir()]
    (whole,), shares = sizes["FULL_STATE_DICT"], sizes["SHARDED_STATE_DICT"]
    assert len(shares) == 2 and max(shares) < 0.53 * whole and sum(shares) < 1.05 * whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_sharded_run_ends_with_the_bytes_of_an_undisturbed_one(
    nursery: Nursery, runs: dict[str | None, Path], tmp_path: Path, kind: str
) -> None:
    kill = {"rank": 1, "signal": [6, signal.SIGKILL]}
    train(nursery, tmp_path, *SMALL, kind=kind, fault=kill, codes=[1, -signal.SIGKILL])
    assert "resuming from" in train(nursery, tmp_path, *SMALL, kind=kind).output
    assert digests(tmp_path) == digests(runs[kind])


def test_any_kind_of_run_continues_from_any_other_with_equal_bytes(
    nursery: Nursery, runs: dict[str | None, Path], tmp_path: Path
) -> None:
    where = copy_until(runs["SHARDED_STATE_DICT"], tmp_path / "run", 2)
    for step, kind in ((4, None), (6, "FULL_STATE_DICT"), (8, None), (LAST, KINDS[1])):
        train(nursery, where, *SMALL, "--stop-after-steps", step, kind=kind)
    steps, wanted = rows(where, "steps"), rows(runs[None], "steps")
    assert steps == wanted
    name = "model.safetensors"
    assert (where / name).read_bytes() == (runs[None] / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_other_numbers_of_processes_continue(
    nursery: Nursery, runs: dict[str | None, Path], tmp_path: Path, kind: str
) -> None:
    where = copy_until(runs[kind], tmp_path / "run", 2)
    for step, how, world in ((4, kind, 3), (6, None, 1), (LAST, kind, 2)):
        train(nursery, where, *SMALL, "--stop-after-steps", step, kind=how, world=world)
    assert_close(where, runs[None])


MORE = ["--ema", 0.8, "--accumulate", 3, "--clip-norm", 0.05, "--keep-best", "eval_loss"]


def test_average_accumulation_clipping_and_the_best_weights_are_those_of_an_unsharded_run(
    nursery: Nursery, arguments: dict, tmp_path: Path
) -> None:
    args = [*arguments["train_regression"], *MORE, "--resume", "auto"]
    for name, how in (("ddp", None), ("sharded", KINDS[1])):
        plan: dict[str, Any] = {"kind": how, "script": "train_regression", "double": True}
        train(nursery, tmp_path / name, *args, "--stop-after-steps", 6, **plan)
        train(nursery, tmp_path / name, *args, **plan)
    assert_close(tmp_path / "ddp", tmp_path / "sharded", tolerance=1e-9)
    for name in ("model", "raw", "best"):
        (ours, about), (theirs, _) = (saved(tmp_path / x, name) for x in ("sharded", "ddp"))
        assert about["script"] == "train_regression" and ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert torch.allclose(value, theirs[key], rtol=0, atol=1e-6), (name, key)


def test_channels_last_weights_are_sharded_and_come_back(
    nursery: Nursery, arguments: dict, tmp_path: Path
) -> None:
    """A run without sharding goes on sharded and back, its convolutions in another layout."""
    # Not the model with nn.Dropout, which draws its masks in the order of the numbers in memory.
    args = [*arguments["train_mnist"], "--model", "compact", "--resume", "auto"]
    plan: dict[str, Any] = {"script": "train_mnist", "double": True}
    train(nursery, tmp_path / "whole", *args, **plan)
    for step, kind in ((3, None), (6, "FULL_STATE_DICT"), (10, None)):
        where = tmp_path / "run"
        train(nursery, where, *args, "--stop-after-steps", step, kind=kind, **plan)
    assert_close(tmp_path / "whole", tmp_path / "run", tolerance=1e-9)


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_regression", ["--num-samples", 96, "--batch-size", 30, "--optimizer", "sgd"]),
        ("examples.text", ["--num-lines", 7, "--batch-size", 6, "--epochs", 1]),
        ("examples.gpt", ["--layers", 1, "--width", 32, "--stop-after-steps", 2]),
        ("train_mnist", ["--model", "normed", "--stop-after-steps", 6]),
    ],
    ids=["sgd and a linear model", "a batch without rows", "tied weights", "BatchNorm"],
)
def test_what_once_failed_when_it_was_sharded_has_the_loss_of_an_unsharded_run(
    nursery: Nursery, arguments: dict, tmp_path: Path, script: str, flags: list
) -> None:
    double = script == "train_mnist"  # BatchNorm amplifies rounding
    shared = arguments[script] if double else ["--timeout", 30, "--no-pictures", "--log-every", 1]
    for kind in (None, "SHARDED_STATE_DICT"):
        plan: dict[str, Any] = {"script": script, "kind": kind, "world": 3, "double": double}
        train(nursery, tmp_path / str(kind), *shared, *flags, **plan)
    assert_close(tmp_path / "None", tmp_path / "SHARDED_STATE_DICT", 1e-9 if double else 1e-5)


def test_weights_of_a_file_are_shared_out(
    nursery: Nursery, runs: dict[str | None, Path], tmp_path: Path
) -> None:
    args = [*SMALL, "--start-from", runs[None] / "model.safetensors", "--stop-after-steps", 4]
    for kind in (None, "SHARDED_STATE_DICT"):
        outcome = train(nursery, tmp_path / str(kind), *args, kind=kind)
        assert "left as initialised: none; not used: none" in outcome.output
    assert_equal_bytes(tmp_path / "None", tmp_path / "SHARDED_STATE_DICT")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "model"),
    [
        ("examples.text", ["--num-lines", 300, "--batch-size", 30, "--clip-norm", "inf"]),
        ("contiguous", ["--model", "compact"]),
        ("contiguous", ["--model", "wide"]),
        ("train_regression", ["--model", "mlp"]),
        ("examples.colour_pictures", ["--num-pictures", 600]),
        ("examples.two_towers", ["--batch-size", 60, "--dataset"]),
    ],
)
def test_the_scripts_have_the_losses_of_ddp(
    nursery: Nursery, arguments: dict, tmp_path: Path, script: str, model: list[object]
) -> None:
    known = arguments | {"contiguous": arguments["train_mnist"]}
    model = [*model, arguments["train_mnist"][1]] if model[-1] == "--dataset" else model
    args = [*known.get(script, ["--log-every", 1]), *model, "--epochs", 4]
    args += ["--stop-after-steps", 20, "--timeout", 60]
    for kind in (None, *KINDS):
        train(nursery, tmp_path / str(kind), *args, kind=kind, script=script, timeout=300)
    for kind in KINDS:
        assert len(rows(tmp_path / kind, "steps")) == 20
        assert_close(tmp_path / "None", tmp_path / kind)


# What is refused.


def sharding(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], **world: Any) -> Any:
    """What shard() makes of a launch: the state of an accelerator of two processes."""
    for key, given in env("FULL_STATE_DICT", **changes).items():
        monkeypatch.setenv(key, given)
    state = SimpleNamespace()
    whole = {"num_processes": 2, "mixed_precision": "no", "prepare": None, "state": state}
    monkeypatch.setattr(shards, "PartialState", lambda: state)
    shards.shard(SimpleNamespace(**whole | world))
    return state


@pytest.mark.parametrize(
    ("changes", "world"),
    [
        ({"FSDP_VERSION": "1"}, {}),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}),
        ({"FSDP_IGNORED_MODULES": "head"}, {}),
        ({}, {"mixed_precision": "fp16"}),
        ({}, {"num_processes": 1}),
    ],
)
def test_what_would_silently_train_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict, world: dict
) -> None:
    with pytest.raises(UsageError, match="sharded weights need fsdp_version: 2, several"):
        sharding(monkeypatch, changes, **world)


@pytest.mark.parametrize("damage", ["missing", "short", "garbage"])
def test_a_share_that_does_not_fit_ends_in_one_sentence(
    nursery: Nursery, runs: dict[str | None, Path], tmp_path: Path, damage: str
) -> None:
    """In a sharded run and in one that is not, even if the manifest knows the file."""
    where = copy_until(runs["SHARDED_STATE_DICT"], tmp_path / "run", 8)
    path = where / "checkpoints" / "step-0000000008"
    share = path / "state" / "shard-00001.bin"
    if damage == "missing":
        share.unlink()
    elif damage == "garbage":
        share.write_bytes(b"{" * 1000)
    else:
        torch.save(torch.load(share, weights_only=True)[:1], share)
    reforge(path)
    for kind, world in (("SHARDED_STATE_DICT", 2), (None, 1)):
        args = [*SMALL, "--resume", path]
        outcome = train(nursery, where, *args, kind=kind, world=world, codes=[2] * world)
        assert outcome.output.count("\nerror:") == 1, outcome.output


# What is frozen.


@pytest.mark.parametrize("kind", [None, KINDS[1]])
def test_a_killed_run_ends_with_equal_bytes_and_its_checkpoints_hold_nothing_frozen(
    nursery: Nursery, tmp_path: Path, kind: str | None
) -> None:
    args = [*SMALL, "--hidden", "400,400", "--keep", 2, "--ema", 0.9, "--keep-best", "eval_loss"]
    plan: dict[str, Any] = {"script": "adapted", "kind": kind}
    only = {"ONLY_TRAINED": "1"}
    kill: dict[str, Any] = {"fault": {"rank": 1, "signal": [6, signal.SIGKILL]}}
    kill["codes"] = [1, -signal.SIGKILL]
    train(nursery, tmp_path / "run", *args, **plan, env=only, **kill)
    for name in ("run", "whole"):
        train(nursery, tmp_path / name, *args, **plan, env=only)
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")
    sizes = [path.stat().st_size for path in tmp_path.glob("run/**/*") if path.is_file()]
    assert sum(sizes) < 400 * 400 * 4 * 0.5
    for name in ("model", "raw", "best"):
        assert not any(weight.startswith("base.") for weight in saved(tmp_path / "run", name)[0])
    changed = train(nursery, tmp_path / "run", *args, **plan, env={"BASE": "1"}, codes=[2, 2])
    assert "another run: the frozen weight base.0.weight of model 0 is" in changed.output
    assert changed.output.count("\nerror:") == 1


def test_a_checkpoint_that_holds_what_is_frozen_is_read(nursery: Nursery, tmp_path: Path) -> None:
    """As those of older versions do, which know no digests."""
    plan: dict[str, Any] = {"script": "adapted", "world": 1}
    train(nursery, tmp_path / "run", *SMALL, **plan)
    where = copy_until(tmp_path / "run", tmp_path / "older", 8)
    for path in where.glob("checkpoints/step-*"):
        file, trainer = path / "state" / "model.safetensors", path / "trainer.json"
        content = json.loads(trainer.read_text())
        of_base = {n: v for n, v in saved(where)[0].items() if n.startswith("base.")}
        save_file(load_file(file) | of_base, file)
        frozen = [name for name in content["fingerprint"] if name.startswith("the frozen ")]
        assert len(frozen) == len(of_base) > 0
        for name in frozen:
            del content["fingerprint"][name]
        trainer.write_text(json.dumps(content))
        reforge(path)
    changed = train(nursery, where, *SMALL, **plan, env={"BASE": "1"}, codes=[2])
    assert "the weight base.0.bias of the checkpoint is not the one of this run" in changed.output
    train(nursery, where, *SMALL, **plan)
    assert digests(where) == digests(tmp_path / "run")
