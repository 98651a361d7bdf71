"""What the loop changes beside the trained weights comes back on a resume, or is refused."""

from collections import Counter, OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import assert_same_bytes, refused, rows
from loops import changed, train
from safetensors.torch import load_file
from saving import step as step_of
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset

from trainkit.checkpoints.parts import check_loadable, load_tree
from trainkit.config import TrainingConfig
from trainkit.errors import RunFailure
from trainkit.numbers.loaders import batches_of, make_loaders
from trainkit.repairs.replaced import end_workers


class WithTeacher(nn.Module):
    """A student, a teacher that may follow it, and a base that is frozen and stays as it is."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(2, 4)
        self.teacher = nn.Linear(2, 4).requires_grad_(False)
        self.base = nn.Linear(2, 4).requires_grad_(False)

    def forward(self, x):
        return self.student(x) + self.teacher(x) + self.base(x)

    @torch.no_grad()
    def follow(self):
        for teacher, student in zip(
            self.teacher.parameters(), self.student.parameters(), strict=True
        ):
            teacher.data.lerp_(student, 0.5)  # .data: torch does not tally these changes


class Count:
    """A plain object that counts, with a state of every kind that can be saved."""

    def __init__(self):
        self.state = {"num": 0, 3: None, "pair": (1, float("inf")), "x": torch.zeros(2).bfloat16()}
        self.state |= {"best": np.float64(0.5), "seen": np.arange(3), "of": {"3": [True, "text"]}}

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        assert [*map(type, state.values())] == [*map(type, self.state.values())]
        self.state = state


def kill_at(number, then=lambda run, number: None):
    def body(run, n):
        then(run, n)
        if n == number:
            raise KeyboardInterrupt

    return body


def registering(things: str, **names):
    """`train` with a script that registers these things."""
    line = r"\1run.accelerator.register_for_checkpointing(" + things + r")\n\1run.begin("
    return changed((r"^( +)run.begin\(", line), **names)


def test_a_registered_state_comes_back_with_its_types_or_is_refused_by_its_class(tmp_path):
    state = {
        4: [1, 2.5, True, None, "text", b"bytes", float("-inf"), 1j],
        (1, "a"): (1, (2,), torch.Size([3]), {1, 2}),
        "4": OrderedDict(b=Counter("aab"), a={}),
        "numpy": [np.float32(1.5), np.int64(7), np.bool_(True), np.ones((2, 0)), np.array(["a"])],
        "a.b": torch.ones(2, 3).bfloat16(),
    }
    check_loadable(state, "it")
    torch.save(state, tmp_path / "file")
    assert repr(load_tree(tmp_path / "file")) == repr(state)
    for value in (deque([1]), SimpleNamespace(), Count(), lambda: 1):
        name = r"something \(" if callable(value) else rf"a \S*{type(value).__name__},"
        with refused(f"^it holds {name}.* which no resume would load"):
            check_loadable({"x": value}, "it")


@pytest.mark.parametrize("since, killed_at", [(8, 6), (8, 11)])
def test_frozen_weights_are_in_a_checkpoint_once_they_have_moved(tmp_path, since, killed_at):
    def follow(run, number):
        # A resume counts its steps from 1, so the position of the run decides.
        if run.progress.step + 1 >= since:
            run.models[0].follow()

    flags = f"--save-every 1 --run-dir {tmp_path}/"
    whole = train(flags + "whole", body=follow, first=WithTeacher)
    with pytest.raises(KeyboardInterrupt):
        train(flags + "killed", body=kill_at(killed_at, follow), first=WithTeacher)
    path = tmp_path / "killed" / "checkpoints" / f"step-{killed_at - 1:010d}"
    saved = {name.partition(".")[0] for name in load_file(path / "state" / "model.safetensors")}
    assert saved == ({"student", "teacher"} if killed_at > since else {"student"})
    again = train(flags + "killed --resume auto", body=follow, first=WithTeacher)
    assert again == whole[killed_at - 1 :]
    assert_same_bytes(tmp_path / "killed", tmp_path / "whole")


def test_what_is_registered_comes_back_with_its_types(tmp_path):
    def run(name, body, **parts):
        average, tally = parts["average"], parts["tally"]

        def follow(run, number):
            average.update_parameters(run.models[0])
            tally.state["num"] += 1
            tally.state["x"] = tally.state["x"] + 1
            body(run, number)

        return registering("average, tally", **parts)(
            f"--save-every 1 --run-dir {tmp_path}/{name}", body=follow
        )

    def parts():
        torch.manual_seed(0)
        return {"average": AveragedModel(nn.Linear(2, 4)), "tally": Count()}

    whole, again = parts(), parts()
    run("whole", lambda run, number: None, **whole)
    with pytest.raises(KeyboardInterrupt):
        run("killed", kill_at(9), **parts())
    assert (step_of(tmp_path / "killed", 8) / "state" / "registered.bin").is_file()
    run("killed --resume auto", lambda run, number: None, **again)
    assert repr(again["average"].state_dict()) == repr(whole["average"].state_dict())
    assert repr(again["tally"].state) == repr(whole["tally"].state)
    assert again["tally"].state["num"] == again["average"].n_averaged == 12
    assert_same_bytes(tmp_path / "killed", tmp_path / "whole")
    with refused(r"register_for_checkpointing\(...\) is \['AveragedModel', 'Count'\] there and"):
        registering("tally, average", **parts())(f"--run-dir {tmp_path}/killed --resume auto")
    with refused(r"\['AveragedModel', 'Count'\] there and \[\] here"):
        train(f"--run-dir {tmp_path}/killed --resume auto")


class Queue(Count):
    def state_dict(self):
        return {"seen": deque([1, 2])}


def test_what_no_checkpoint_would_hold_is_refused_in_the_first_steps(tmp_path):
    flags = f"--run-dir {tmp_path}/run --save-every 1"
    with refused(r"the state_dict\(\) of the Queue, registered with .* holds a collections.deque"):
        registering("Queue()", Queue=Queue)(flags)
    line = r"\g<0>\n\1run.accelerator.register_for_checkpointing(Count())"
    with pytest.raises(RuntimeError, match=r"got a Count after run\.begin"):
        changed((r"^( +)run.begin.*", line), Count=Count)(flags)
    teacher = nn.BatchNorm1d(2)
    edit = r'\{"pictures": "test"\}', r"\g<0>, fixed={'teacher': teacher}"
    fixed = changed(edit, teacher=teacher)
    fixed(flags, body=lambda run, number: teacher.eval()(torch.ones(3, 2)))
    with pytest.raises(RunFailure, match=r"fixed\['teacher'\] .* has changed.*\.eval\(\) on it"):
        fixed(flags, body=lambda run, number: teacher.train()(torch.ones(3, 2)))
    assert len(rows(tmp_path / "run")) == 0  # in the first step, before its row


def test_what_is_done_at_the_start_of_an_epoch_is_undone_by_a_resume_in_its_middle(tmp_path):
    """The run that saved the checkpoint had done it before: here with the weights of that time."""
    heads = []

    def begin(run, optimizers, epoch):
        heads.append(epoch)
        run.models[0].follow()
        for group in optimizers[1].param_groups if epoch else ():
            group["lr"] /= 2

    head = r"\1for epoch in run.epochs():\n\1    begin(run, optimizers, epoch)"
    no_schedules = r"schedules = \[make_scheduler.*", "schedules = []"
    train_with = changed((r"^( +)for _ in run.epochs\(\):", head), no_schedules, begin=begin)
    flags = f"--save-every 1 --run-dir {tmp_path}/"
    whole = train_with(flags + "whole", first=WithTeacher)
    heads.clear()
    with pytest.raises(KeyboardInterrupt):
        train_with(flags + "killed", body=kill_at(9), first=WithTeacher)
    again = train_with(flags + "killed --resume auto", first=WithTeacher)
    assert len(heads) == 3 and again == whole[8:]
    assert_same_bytes(tmp_path / "killed", tmp_path / "whole")


def test_an_error_in_an_evaluation_loses_no_step_and_a_resume_evaluates_first(tmp_path):
    drawn: list[float] = []
    more = "--ema 0.9 --keep-best eval_loss"

    def draw(losses, fails_at=0):
        drawn.append(float(torch.rand(()) + np.random.rand()))
        if len(drawn) == fails_at:
            raise ValueError("Only one class present in y_true")
        return losses

    flags = f"--run-dir {tmp_path}/"
    losses = train(flags + f"whole {more}", change=draw)
    whole, num_batches = drawn.copy(), len(drawn) // 2
    drawn.clear()
    with pytest.raises(ValueError, match="Only one class"):
        train(flags + f"failed {more}", change=lambda losses: draw(losses, num_batches + 2))
    names = [path.name for path in sorted((tmp_path / "failed" / "checkpoints").iterdir())]
    assert names == ["step-0000000006", "step-0000000012"] and len(losses) == 12
    drawn.clear()
    assert train(flags + f"failed --resume auto {more}", change=draw) == []
    assert drawn == whole[num_batches:]
    assert_same_bytes(
        tmp_path / "failed", tmp_path / "whole", "model_1.safetensors", "best.safetensors"
    )


class Epochal(Dataset):
    """Samples that depend on the epoch, which set_epoch tells it."""

    def __init__(self, held=None):
        self.epoch, self.held = 0, held

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([index, self.epoch])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_set_is_told_the_epoch_where_its_samples_are_made(accelerator, workers):
    config = TrainingConfig(run_dir=Path("unused"), batch_size=2, num_workers=workers)
    loaders = make_loaders(accelerator, Epochal(), Epochal(), config)
    train_loader, eval_loader = accelerator.prepare(*loaders)
    for epoch in (0, 1, 5):
        batches = batches_of(train_loader)
        batches.set_position(epoch, 0)
        with batches.read_by_run():
            seen = {int(row[1]) for batch in train_loader for row in batch}
        assert seen == {epoch}, "a worker that lives on has the epoch of its start"
    with batches_of(eval_loader).read_by_run():
        assert {int(row[1]) for batch in eval_loader for row in batch} == {0}
    end_workers(accelerator)
