"""A model spread over the processes (FSDP2) trains, saves and resumes like one that is not."""

import json
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import CONFIGS, ROOT, rows, run, saved
from faults import Nursery, Outcome, digests
from test_checkpoint import reforge
from torch import nn

from trainkit import shards
from trainkit.errors import UsageError
from trainkit.manifest import verify

CLOSE = 1e-6  # between losses of float32 runs that add up in different orders
KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
TEXT = [
    "--num-lines",
    300,
    "--epochs",
    2,
    "--batch-size",
    30,
    "--log-every",
    1,
    "--timeout",
    20,
    "--save-every",
    4,
    "--keep",
    9,
    "--clip-norm",
    "inf",
]
LAST = 20  # steps of it, ten per epoch


def env(kind: str | None, **changes: str) -> dict[str, str]:
    """What the launcher hands on of 2cpu_fsdp.yaml, with this fsdp_state_dict_type; None: DDP."""
    if kind is None:
        return {}
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
    script: str = "examples.text",
    codes: list[int] | None = None,
    **plan: Any,
) -> Outcome:
    outcome = nursery.run(
        script, *args, "--run-dir", where, world=world, env=env(kind) | plan.pop("env", {}), **plan
    )
    assert outcome.codes == (codes or [0] * world), outcome.output
    assert ("sharded" in outcome.output.splitlines()[0]) == (kind is not None), outcome.output
    return outcome


@pytest.fixture(scope="module")
def whole(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """An undisturbed run of each kind; None: without sharding."""
    folder = tmp_path_factory.mktemp("whole")
    for kind in (None, *KINDS):
        train(nursery, folder / str(kind), *TEXT, kind=kind)
    return {kind: folder / str(kind) for kind in (None, *KINDS)}


def copy_until(source: Path, target: Path, step: int) -> Path:
    """The run folder as it was after the checkpoint of that step."""
    shutil.copytree(source, target)
    (target / "DONE").unlink()
    for path in target.glob("checkpoints/step-*"):
        if path.name > f"step-{step:010d}":
            shutil.rmtree(path)
    return target


def assert_close(one: Path, other: Path, tolerance: float = CLOSE) -> None:
    """All losses of the steps are equal but for `tolerance`, and so are those of the last epoch."""
    pairs = [*zip(rows(one, "steps"), rows(other, "steps"), strict=True)]
    for a, b in [*pairs, (rows(one, "epochs")[-1], rows(other, "epochs")[-1])]:
        assert a == pytest.approx(b, abs=tolerance), a["step"]


def test_a_sharded_run_has_the_bytes_of_an_unsharded_one(whole: dict[str | None, Path]) -> None:
    assert len(rows(whole[None], "steps")) == LAST
    for kind in KINDS:
        for name in ("metrics.jsonl", "model.safetensors"):
            assert (whole[kind] / name).read_bytes() == (whole[None] / name).read_bytes(), kind
    assert digests(whole["FULL_STATE_DICT"]) == digests(whole[None])


def test_a_sharded_checkpoint_has_a_share_of_every_process(whole: dict[str | None, Path]) -> None:
    state = whole["SHARDED_STATE_DICT"] / "checkpoints" / f"step-{LAST:010d}" / "state"
    sizes = [path.stat().st_size for path in state.glob("shard-*")]
    total = sum(path.stat().st_size for path in state.iterdir())
    assert len(sizes) == 2 and max(sizes) < 0.53 * total and sum(sizes) > 0.95 * total


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_sharded_run_ends_with_the_bytes_of_an_undisturbed_one(
    nursery: Nursery, whole: dict[str | None, Path], tmp_path: Path, kind: str
) -> None:
    kill = {"rank": 1, "signal": [6, signal.SIGKILL]}
    train(
        nursery,
        tmp_path,
        *TEXT,
        "--resume",
        "auto",
        kind=kind,
        fault=kill,
        codes=[1, -signal.SIGKILL],
    )
    outcome = train(nursery, tmp_path, *TEXT, "--resume", "auto", kind=kind)
    assert "resuming from" in outcome.output
    assert digests(tmp_path) == digests(whole[kind])


def test_any_kind_of_run_continues_from_any_other(
    nursery: Nursery, whole: dict[str | None, Path], tmp_path: Path
) -> None:
    """Sharded on 2, then unsharded on 1, then sharded on 2 again, saving the other kind."""
    where = copy_until(whole["SHARDED_STATE_DICT"], tmp_path / "run", 4)
    more = [*TEXT, "--resume", "latest", "--stop-after-steps"]
    train(nursery, where, *more, 12, world=1)
    (where / "DONE").unlink()
    train(nursery, where, *more, LAST, kind="FULL_STATE_DICT")
    assert_close(where, whole[None])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_chains_of_resumes(
    nursery: Nursery, whole: dict[str | None, Path], tmp_path: Path, kind: str
) -> None:
    more = [*TEXT, "--resume", "latest", "--stop-after-steps"]
    three = copy_until(whole[kind], tmp_path / "three", 4)
    train(nursery, three, *more, 8, kind=kind, world=3)
    train(nursery, three, *more, 12, world=1)
    train(nursery, three, *more, LAST, kind=kind)
    assert_close(three, whole[None])
    back = copy_until(whole[None], tmp_path / "back", 4)
    train(nursery, back, *more, 12, kind=kind)
    train(nursery, back, *more, LAST)
    assert_close(back, whole[None])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_three_processes_resume_exactly(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    train(nursery, tmp_path / "whole", *TEXT, kind=kind, world=3)
    kill = {"rank": 2, "signal": [6, signal.SIGKILL]}
    train(
        nursery,
        tmp_path / "run",
        *TEXT,
        "--resume",
        "auto",
        kind=kind,
        world=3,
        fault=kill,
        codes=[1, 1, -signal.SIGKILL],
    )
    train(nursery, tmp_path / "run", *TEXT, "--resume", "auto", kind=kind, world=3)
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")


MORE = ["--ema", 0.8, "--accumulate", 3, "--clip-norm", 0.05, "--keep-best", "eval_loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_average_accumulation_clipping_and_the_best_weights_are_those_of_an_unsharded_run(
    nursery: Nursery, arguments: dict, tmp_path: Path, kind: str
) -> None:
    args = [*arguments["train_regression"], *MORE]
    for name, how in (("ddp", None), ("sharded", kind)):
        plan: dict[str, Any] = {"kind": how, "script": "train_regression", "double": True}
        train(nursery, tmp_path / name, *args, "--stop-after-steps", 6, **plan)
        (tmp_path / name / "DONE").unlink()
        train(nursery, tmp_path / name, *args, "--resume", "latest", **plan)
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
    ],
    ids=["sgd and a linear model", "a batch without rows", "tied weights"],
)
def test_what_once_failed_when_it_was_sharded_has_the_loss_of_an_unsharded_run(
    nursery: Nursery, tmp_path: Path, script: str, flags: list
) -> None:
    flags = [*flags, "--timeout", 30, "--no-pictures", "--log-every", 1]
    for kind in (None, "SHARDED_STATE_DICT"):
        train(nursery, tmp_path / str(kind), *flags, script=script, kind=kind, world=3)
    assert_close(tmp_path / "None", tmp_path / "SHARDED_STATE_DICT", 1e-5)


def test_a_share_that_is_missing_is_named(
    whole: dict[str | None, Path], nursery: Nursery, tmp_path: Path
) -> None:
    run_dir = copy_until(whole["SHARDED_STATE_DICT"], tmp_path / "run", 12)
    folder = run_dir / "checkpoints" / "step-0000000012"
    min(folder.glob("state/shard-*")).unlink()
    reforge(folder)
    outcome = train(
        nursery, run_dir, *TEXT, "--resume", "latest", kind="SHARDED_STATE_DICT", codes=[2, 2]
    )
    assert "missing" in outcome.output or "cannot be loaded" in outcome.output, outcome.output


def test_weights_of_a_file_are_shared_out(
    nursery: Nursery, whole: dict[str | None, Path], tmp_path: Path
) -> None:
    args = [*TEXT, "--start-from", whole[None] / "model.safetensors", "--stop-after-steps", 4]
    for kind in (None, "SHARDED_STATE_DICT"):
        outcome = train(nursery, tmp_path / str(kind), *args, kind=kind)
        assert "left as initialised: none; not used: none" in outcome.output
    assert_close(tmp_path / "None", tmp_path / "SHARDED_STATE_DICT")


def test_batchnorm_counts_what_the_first_process_saw_as_under_ddp(
    nursery: Nursery, arguments: dict, tmp_path: Path
) -> None:
    args = [*arguments["train_mnist"], "--model", "normed"]
    for kind in (None, "SHARDED_STATE_DICT"):
        train(nursery, tmp_path / str(kind), *args, kind=kind, script="train_mnist", double=True)
    assert_close(tmp_path / "None", tmp_path / "SHARDED_STATE_DICT", tolerance=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "model"),
    [
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


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("FSDP_VERSION", "1", "use fsdp_version: 2"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "True", "use false"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "1", "use false"),
        ("FSDP_OFFLOAD_PARAMS", "yes", "use false"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "on", "use false"),
        ("FSDP_IGNORED_MODULES", "head", "leave it out"),
        ("FSDP_AUTO_WRAP_POLICY", "SOME_WRAP", "use NO_WRAP"),
        ("FSDP_STATE_DICT_TYPE", "LOCAL_STATE_DICT", "use FULL_STATE_DICT"),
    ],
)
def test_what_a_run_could_not_follow_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, remedy: str
) -> None:
    for key, given in env("FULL_STATE_DICT", **{name: value}).items():
        monkeypatch.setenv(key, given)
    with pytest.raises(UsageError, match=f"{name.lower()} {value} .*{remedy}"):
        shards.plugin("no")


def test_fp16_is_refused_with_sharded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, given in env("FULL_STATE_DICT").items():
        monkeypatch.setenv(key, given)
    with pytest.raises(UsageError, match="fp16 is not supported with sharded weights: use bf16"):
        shards.plugin("fp16")


@pytest.mark.parametrize("spelling", ["true", "True", "1", "yes", "on", "Y"])
def test_every_spelling_of_true_shards(monkeypatch: pytest.MonkeyPatch, spelling: str) -> None:
    for key, given in env("FULL_STATE_DICT", ACCELERATE_USE_FSDP=spelling).items():
        monkeypatch.setenv(key, given)
    policy = shards.plugin("bf16").mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "no")
    assert shards.plugin("no") is None


def test_a_key_that_is_left_out_has_accelerates_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UsageError, match="fsdp_version 1"):
        shards.plugin("no")


@pytest.mark.parametrize(
    ("script", "world", "changes", "message"),
    [
        ("examples.text", 2, {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}, "layer class Block"),
        ("examples.text", 2,
         {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "1000"}, "ModuleList"),
        ("examples.gan", 2, {}, "FSDP2 shards one model"),
        ("examples.text", 1, {}, "use several processes"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_sharded_ends_in_one_sentence(
    nursery: Nursery, tmp_path: Path, script: str, world: int, changes: dict, message: str
) -> None:
    args = ["--num-lines", 60] if script == "examples.text" else []
    changes = env("FULL_STATE_DICT", **changes)
    outcome = nursery.run(script, *args, "--run-dir", tmp_path / "r", world=world, env=changes)
    assert outcome.codes == [2] * world, outcome.output
    errors = [line for line in outcome.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0], outcome.output
    assert "Traceback" not in outcome.output


# Files that somebody else made.


class Evil:
    def __reduce__(self) -> tuple:
        return (open, ("executed", "w"))


def assert_refused(nursery: Nursery, run_dir: Path, checkpoint: Path) -> None:
    """In one sentence, by a sharded run and by one that is not."""
    args = [*TEXT, "--run-dir", run_dir, "--resume", checkpoint]
    for kind, world in (("SHARDED_STATE_DICT", 2), (None, 1)):
        outcome = nursery.run("examples.text", *args, world=world, env=env(kind))
        assert outcome.codes == [2] * world, outcome.output
        assert outcome.output.count("\nerror:") == 1, outcome.output


@pytest.mark.parametrize("name", [".metadata", "optimizer.bin", "scheduler.bin"])
def test_a_forged_file_of_a_sharded_checkpoint_executes_nothing(
    nursery: Nursery, whole: dict[str | None, Path], tmp_path: Path, name: str
) -> None:
    where = copy_until(whole["SHARDED_STATE_DICT"], tmp_path / "run", 8)
    path = where / "checkpoints" / "step-0000000008"
    (path / "state" / name).write_bytes(pickle.dumps(Evil(), protocol=2))
    reforge(path)
    assert_refused(nursery, where, path)
    assert not (ROOT / "executed").exists() and not Path("executed").exists()


@pytest.mark.parametrize("damage", ["missing", "shape", "garbage"])
def test_a_share_that_does_not_fit_ends_in_one_sentence(
    nursery: Nursery, whole: dict[str | None, Path], tmp_path: Path, damage: str
) -> None:
    from safetensors.torch import load_file, save_file

    where = copy_until(whole["SHARDED_STATE_DICT"], tmp_path / "run", 8)
    path = where / "checkpoints" / "step-0000000008"
    share = path / "state" / "shard-00002-model-00001-of-00001.safetensors"
    if damage == "missing":
        share.unlink()
    elif damage == "garbage":
        share.write_bytes(b"{" * 1000)
    else:
        tensors = {name: value[:1].clone() for name, value in load_file(share).items()}
        offsets = {name: {"saved_offsets": [0] * value.ndim} for name, value in tensors.items()}
        save_file(tensors, share, {"DCP_SHARDING_INFO": json.dumps(offsets)})
    assert verify(path) is not None
    reforge(path)
    assert_refused(nursery, where, path)


# Accelerate.


def test_accelerate_shards_cpu_processes_only_because_we_make_it() -> None:
    """If this fails, Accelerate does it by itself or no longer can: see shard_cpu_processes."""
    outcome = run("tests/probe.py", config="2cpu_fsdp")
    assert outcome.returncode == 0, outcome.stderr
    world = json.loads(outcome.stdout.splitlines()[-1])
    assert world["of_accelerate_alone"] == "MULTI_CPU" and world["sharded"]


def test_a_tied_weight_is_saved_under_both_names_and_stays_tied() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    tensors = shards.whole(model.state_dict())
    assert tensors.keys() == {"0.weight", "1.weight"}
