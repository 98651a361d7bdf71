"""What the loop changes beside the trained weights comes back on a resume, or is refused."""

import copy
import json
import weakref
from collections import Counter, OrderedDict, deque
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import assert_same_bytes, refused, rows
from loops import changed, train
from safetensors.torch import load_file
from saving import Run as SmallRun
from saving import step as step_of
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import ConcatDataset, Dataset, Subset

from trainkit.checkpoints import sharded as shards
from trainkit.checkpoints.changes import Marks
from trainkit.checkpoints.contents import Contents
from trainkit.checkpoints.frozen import Frozen
from trainkit.checkpoints.registered import pack_state, unpack_state
from trainkit.config import TrainingConfig
from trainkit.errors import RunFailure
from trainkit.numbers.loaders import InMemory, batches_of, make_loaders
from trainkit.repairs.fixes import end_workers
from trainkit.run.data import WatchedSets
from trainkit.run.variables import Variables


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


def test_a_state_becomes_json_and_tensors_and_is_the_same_afterwards():
    class Kind(IntEnum):
        A = 1

    state = {
        "none": None,
        4: [1, 2.5, True, "text", float("-inf")],
        (1, "a"): (1, (2,), torch.Size([3])),
        "4": OrderedDict(b=Counter("aab"), a={}),
        "numpy": [np.float32(1.5), np.int64(7), np.bool_(True), np.ones((2, 0)), np.arange(3)],
        "a.b": torch.ones(2, 3).bfloat16(),
        "a": {"b": nn.Parameter(torch.zeros(())), "c": torch.arange(6).view(2, 3).T},
    }
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(pack_state(state, "0", "it", tensors))
    assert len(tensors) == 8
    again = unpack_state(json.loads(text), tensors)
    assert repr(again).replace("Parameter containing:\n", "") == repr(state).replace(
        "Parameter containing:\n", ""
    ).replace("tensor(0., requires_grad=True)", "tensor(0.)")
    for value in ({1}, deque([1]), b"text", Kind.A, object(), print, np.array([{}]), 1j):
        with refused(f"it, 'x', registered with .* holds a {type(value).__name__}, which"):
            pack_state({"x": value}, "0", "it", {})


@pytest.mark.parametrize("since, killed_at", [(1, 9), (8, 6), (8, 11)])
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
    assert (step_of(tmp_path / "killed", 8) / "state" / "registered.safetensors").is_file()
    run("killed --resume auto", lambda run, number: None, **again)
    assert repr(again["average"].state_dict()) == repr(whole["average"].state_dict())
    assert repr(again["tally"].state) == repr(whole["tally"].state)
    assert again["tally"].state["num"] == again["average"].n_averaged == 12
    assert_same_bytes(tmp_path / "killed", tmp_path / "whole")
    with refused("holds AveragedModel, Count of accelerator.register_for_checkpointing"):
        registering("tally, average", **parts())(f"--run-dir {tmp_path}/killed --resume auto")
    with refused("this run has registered nothing"):
        train(f"--run-dir {tmp_path}/killed --resume auto")


def test_a_prepared_teacher_keeps_its_mode_and_is_told_where_it_is_left_out(tmp_path):
    modes = []
    teacher = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False).eval()
    prepared = r"^( +)run.begin\(\(one, two\),"
    line = r"\1run.begin((one, two, run.accelerator.prepare(teacher)),"
    flags = f"--run-dir {tmp_path}/run"
    train_with = changed((prepared, line), teacher=teacher)
    train_with(flags, body=lambda run, number: modes.append(teacher.training))
    assert modes and not any(modes)
    forgotten = r"^( +)run.begin\(", r"\1run.accelerator.prepare(teacher)\n\1run.begin("
    with pytest.raises(RuntimeError, match="not trained, such as a teacher, need not be prepared"):
        changed(forgotten, teacher=nn.Linear(2, 2).requires_grad_(False))(flags)


class Set(Count):
    def state_dict(self):
        return {"seen": {1, 2}}


def test_what_no_checkpoint_would_hold_is_refused_in_the_first_steps(tmp_path):
    flags = f"--run-dir {tmp_path}/run --save-every 1"
    with refused(r"the state_dict\(\) of the Set, 'seen', registered with .* holds a set"):
        registering("Set()", Set=Set)(flags)
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
    tally = Count()
    line = r"\1run.accelerator.register_for_checkpointing(tally)\n\1run.begin("
    later = r"^( +)run.save\(\)", r"\g<0>\n\1tally.state['num'] += 1"
    after = changed((r"^( +)run.begin\(", line), later, tally=tally)
    with pytest.raises(RuntimeError, match=r"the registered Count was changed after run.save\(\)"):
        after(flags)
    later = r"^( +)run.save\(\)", r"\g<0>\n\1optimizers[1].param_groups[0]['eps'] = 1e-7"
    with pytest.raises(RuntimeError, match=r"eps of optimizer 1 was changed after run.save\(\)"):
        changed(later)(flags)


def test_what_is_done_at_the_start_of_an_epoch_is_undone_by_a_resume_in_its_middle(tmp_path):
    """The run that saved the checkpoint had done it before: here with the weights of that time."""
    heads = []
    head = r"\1for _ in run.epochs():\n\1    run.models[0].follow()"
    edit = r"^( +)for _ in run.epochs\(\):", head + r"; heads.append(1)"
    flags = f"--save-every 1 --run-dir {tmp_path}/"
    whole = changed(edit, heads=heads)(flags + "whole", first=WithTeacher)
    heads.clear()
    for_killed = changed(edit, heads=heads)
    with pytest.raises(KeyboardInterrupt):
        for_killed(flags + "killed", body=kill_at(9), first=WithTeacher)
    again = for_killed(flags + "killed --resume auto", first=WithTeacher)
    assert len(heads) == 3 and again == whole[8:]
    assert_same_bytes(tmp_path / "killed", tmp_path / "whole")


def test_a_learning_rate_that_is_set_at_the_start_of_an_epoch_is_what_it_was_after_a_resume(
    tmp_path,
):
    head = r"\1for epoch in run.epochs():\n\1    halve(optimizers, epoch)"
    edits = (
        (r"^( +)for _ in run.epochs\(\):", head),
        (r"schedules = \[make_scheduler.*", "schedules = []"),
    )

    def halve(optimizers, epoch):
        for group in optimizers[1].param_groups if epoch else ():
            group["lr"] /= 2

    flags = f"--save-every 1 --run-dir {tmp_path}/"
    run = changed(*edits, halve=halve)
    whole = run(flags + "whole")
    with pytest.raises(KeyboardInterrupt):
        run(flags + "killed", body=kill_at(9))
    assert run(flags + "killed --resume auto") == whole[8:]
    assert_same_bytes(tmp_path / "killed", tmp_path / "whole")


def test_what_differs_between_processes_is_refused(tmp_path, monkeypatch):
    run = SmallRun(tmp_path / "run")
    run.model.weight.requires_grad_(False)
    contents = run.checkpoints.contents
    contents.frozen.watch()
    contents.check()
    monkeypatch.setattr(type(run.accelerator), "num_processes", 2)
    theirs = [([set()], "", {})]
    gather = "trainkit.checkpoints.contents.gather_object"
    monkeypatch.setattr(gather, lambda own: [*own, *theirs])
    contents.check()
    with torch.no_grad():
        run.model.weight[3, 7] += 1  # of 350 numbers: torch counts it
    with pytest.raises(RunFailure, match="the frozen weight weight of model 0 differs between"):
        contents.check()
    assert contents.frozen.find_moved() == [{"weight"}]


@pytest.mark.parametrize(
    "thing, change, where",
    [
        ("teacher", "1.running_mean", "1.running_mean, .* BatchNorm into evaluation mode"),
        ("kept", "teacher.1.running_var", r"teacher.1.running_var, .* accelerator.reduce\(buffer"),
        ("teacher", "0.weight", "0.weight, and a checkpoint .* on all processes$"),
        ("kept", "num", "num, and a checkpoint .* on all processes$"),
        ("kept", "0.first", "0.first, and a checkpoint .* on all processes$"),
    ],
)
def test_a_registered_thing_that_differs_is_named_by_its_entry(
    tmp_path, monkeypatch, thing, change, where
):
    """The buffers of a model, or of a module that is registered, are told of BatchNorm."""
    model = nn.Sequential(nn.Linear(350, 1), nn.BatchNorm1d(1))
    state = {"teacher": model.state_dict(), "num": 3, 0: {"first": "a"}}
    things = {
        "teacher": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        "kept": SimpleNamespace(state_dict=lambda: state, load_state_dict=None),
    }
    monkeypatch.setattr(
        "trainkit.checkpoints.registered.take_registered", lambda _: [things[thing]]
    )
    accelerator = SimpleNamespace(num_processes=2)
    contents = Contents(accelerator, Frozen([model]))
    own = contents.registered.entries()[0]
    assert change in own and len(own) == {"teacher": 7, "kept": 9}[thing]
    theirs = [[([], "", dict.fromkeys(contents.registered.names(), "x"))]]
    theirs.append([own | {change: "other"}])
    monkeypatch.setattr(
        "trainkit.checkpoints.contents.gather_object", lambda mine: [*mine, *theirs.pop(0)]
    )
    with pytest.raises(RunFailure, match=f"number 0. differs between processes in {where}"):
        contents.check()


@pytest.mark.parametrize("more", ["", "--ema 0.9 --keep-best eval_loss"])
def test_an_error_in_an_evaluation_loses_no_step_and_a_resume_evaluates_first(tmp_path, more):
    drawn: list[float] = []

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
    best = ["best.safetensors"] if more else []
    assert_same_bytes(tmp_path / "failed", tmp_path / "whole", "model_1.safetensors", *best)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1000, 1000),
        torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.zeros(6, 1000).T,
        torch.zeros(3000, dtype=torch.bfloat16),
        torch.zeros((), dtype=torch.int64),
        torch.zeros(0),
    ],
)
def test_marks_see_that_a_tensor_has_changed(tensor):
    with torch.inference_mode():
        constant = torch.zeros(3)
    marks = Marks({"before": torch.ones(3), "tensor": tensor, "constant": constant})
    assert marks.changed() == set()
    assert marks.changed_in(marks.tensors) == set()
    tensor.data.add_(0.7 if tensor.is_floating_point() else 3)  # all of it, not counted
    assert marks.changed() == ({"tensor"} if tensor.numel() else set())
    marks = Marks({"tensor": tensor})
    tensor[(0,) * tensor.dim() if tensor.numel() else ...] += 1  # one of its numbers, counted
    assert marks.changed() == {"tensor"}
    tensor = nn.Parameter(torch.zeros(50))
    marks = Marks({"tensor": tensor})
    tensor.data = torch.ones(50)  # other memory
    assert marks.changed() == {"tensor"}
    assert marks.changed_in({"tensor": torch.zeros(2)}) == {"tensor"}


def test_a_sharded_run_saves_and_reads_what_is_registered(tmp_path, monkeypatch):
    run, average, tally = SmallRun(tmp_path / "run"), AveragedModel(nn.Linear(3, 3)), Count()
    plugin = SimpleNamespace(state_dict_type=SimpleNamespace(name="SHARDED_STATE_DICT"))
    monkeypatch.setattr(run.accelerator.state, "fsdp_plugin", plugin, raising=False)
    run.accelerator.register_for_checkpointing(average, tally)
    contents = Contents(run.accelerator, Frozen([run.model]))
    states, tensors = json.loads(json.dumps(contents.registered.states()[0])), {}
    before = repr([average.state_dict(), tally.state])
    state, write = shards.writer(run.accelerator, contents.parts(contents.registered.states()[1]))
    write(tmp_path)
    average.update_parameters(nn.Linear(3, 3))
    tally.state |= {"x": torch.ones(2).bfloat16(), "num": 5, "seen": np.ones(3, dtype=int)}
    assert repr([average.state_dict(), tally.state]) != before
    tensors = contents.registered.places(states)
    shards.read(contents.parts(tensors), tmp_path, json.loads(json.dumps(state)))
    contents.registered.load(states, tensors)
    assert repr([average.state_dict(), tally.state]) == before


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


class Wrapping(Dataset):
    def __init__(self, base):
        self.base = base

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        return self.base[index]


@pytest.mark.parametrize("add, num_said", [(None, 0), (0, 0), (1, 1)])
def test_a_set_epoch_of_the_script_with_another_number_is_said_once(add, num_said):
    class After(Epochal):  # keeps another number than it is told, and counts what it makes
        num_made_in_epoch = 0

        def set_epoch(self, epoch):
            self.epoch, self.num_made_in_epoch = epoch + 7, 0

    base = After()
    watched, said = WatchedSets((Subset(base, [0, 1]), Subset(base, [2, 3]))), []
    for epoch in range(3):
        if add is not None:
            base.set_epoch(epoch + add)
        said += watched.note_epoch(epoch)
        base.set_epoch(epoch)  # as the loader does
        base.set_epoch(0)  # and that of the evaluation
        watched.keep_epochs()
    assert len(said) == num_said
    assert all("another number than the epoch of the run, which is 0" in line for line in said)


@pytest.mark.parametrize("workers", [0, 1])
def test_one_set_under_both_is_evaluated_as_in_epoch_0_with_any_number_of_workers(
    accelerator, workers
):
    base = Epochal()
    config = TrainingConfig(
        run_dir=Path("unused"), batch_size=1, eval_batch_size=2, num_workers=workers
    )
    sets = Subset(base, [0, 1]), Subset(base, [2, 3])
    train_loader, eval_loader = accelerator.prepare(*make_loaders(accelerator, *sets, config))
    epochs = {"train": [], "eval": []}
    for epoch in (3, 4):
        batches_of(train_loader).set_position(epoch, 0)
        with batches_of(train_loader).read_by_run(), batches_of(eval_loader).read_by_run():
            for batch in train_loader:  # evaluated in the middle of an epoch
                epochs["train"] += batch[:, 1].tolist()
                epochs["eval"] += [row for batch in eval_loader for row in batch[:, 1].tolist()]
    assert epochs == {"train": [3, 3, 4, 4], "eval": [0] * 8}
    end_workers(accelerator)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda one: one,
        lambda one: Subset(one, [0, 1, 2, 3]),
        lambda one: ConcatDataset([one, Epochal()]),
        lambda one: Wrapping(Subset(Wrapping(one), range(4))),
        lambda one: Wrapping({"a": one}["a"]),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_set_is_told_the_epoch_where_its_samples_are_made(accelerator, wrap, workers):
    config = TrainingConfig(run_dir=Path("unused"), batch_size=2, num_workers=workers)
    train_set = wrap(Epochal())
    loaders = make_loaders(accelerator, train_set, Epochal(), config)
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


class Filled(Dataset):
    """The loop replaces what it holds, as a rollout is."""

    rows = torch.zeros(9)

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return self.rows[index] + torch.rand(()) * 0


@pytest.mark.parametrize("make", [Filled, lambda: InMemory(torch.zeros(9)), lambda: [0.0] * 9])
def test_a_set_that_the_loop_changes_is_told_once(make):
    changing, other = make(), make()
    watched = WatchedSets((other, changing))
    state = torch.get_rng_state()
    assert watched.notes() == []
    assert torch.equal(torch.get_rng_state(), state)
    if isinstance(changing, list):
        changing[:] = [1.0] * 9
    elif isinstance(changing, InMemory):
        changing.tensors[0].add_(1)
    else:
        changing.rows = torch.ones(9)
    (line,) = watched.notes()
    assert line.startswith("note: the samples of the evaluation set have changed since run.begin")
    assert watched.notes() == []


def test_noise_in_the_batches_of_a_subclass_of_rows_in_memory_is_no_change():
    class Noisy(InMemory):
        def __getitems__(self, indices):
            return torch.rand(len(indices)), indices

    watched = WatchedSets((Noisy(torch.zeros(9)), InMemory(torch.zeros(9))))
    torch.rand(3)
    assert watched.notes() == []


@pytest.mark.parametrize("line, is_told", [(r"^( +)run.begin\(", 0), (r"^( +)for batch in run", 1)])
def test_what_a_script_does_to_a_set_before_the_start_is_no_change(tmp_path, capfd, line, is_told):
    """A resume does it again: preference.py adds what its model says of each pair."""
    rows = [{"x": torch.full((2,), float(n)), "y": torch.ones(1)} for n in range(43)]
    before = line, r"\1rows[0] = rows[7]\n\g<0>"
    changed((r"\(Numbers\(\), Numbers\(\)\)", "(rows, rows[:20])"), before, rows=rows)(
        f"--epochs 1 --run-dir {tmp_path}"
    )
    assert capfd.readouterr().out.count("the samples of the training set have ch") == is_told


def test_a_set_whose_samples_cannot_be_made_again_or_differ_anyway_is_no_note():
    generator = np.random.default_rng(0)

    class Drawing(Filled):
        def __getitem__(self, index):
            return generator.random()

    failing = Filled()
    watched = WatchedSets((Drawing(), failing))
    failing.__class__ = type("Closed", (Filled,), {"__getitem__": lambda self, index: 1 / 0})
    assert [*watched.texts] == ["evaluation set"]
    assert watched.notes() == []


def moved(model):
    with torch.no_grad():
        model.weight.add_(1)
    return model


def drawn(generator):
    generator.random()
    return generator


# What a variable of a script holds before the first step, what the loop makes of it, is it named.
VARIABLES = {
    "a module": (lambda model: copy.deepcopy(model), moved, True),
    "the model": (lambda model: model, moved, False),
    "its weights": (
        lambda model: [*model.parameters()],
        lambda weights: [weight.data.add_(1) is None or weight for weight in weights],
        False,
    ),
    "averages by name": (
        lambda model: {"w": model.weight.detach().clone()},
        lambda averages: {"w": 0.9 * averages["w"]},
        True,
    ),
    "a queue": (
        lambda model: torch.zeros(9, 2),
        lambda queue: queue.index_fill_(0, IDS, 1.0),
        True,
    ),
    "an array": (lambda model: np.zeros(9), lambda array: array + 1, True),
    "what is as it was": (lambda model: torch.zeros(9), lambda queue: queue.clone(), False),
    "batches": (lambda model: torch.zeros(9, 2), lambda x: torch.ones(4, 2), False),
    "a state that comes later": (lambda model: None, lambda state: torch.ones(4, 2), True),
    "a state that is gone": (lambda model: torch.ones(4, 2), lambda state: None, False),
    "an output": (lambda model: None, lambda state: 2 * W, False),
    "a sum": (lambda model: torch.zeros(()), lambda total: total + 1, False),
    "a count": (lambda model: torch.zeros(3).int(), lambda counts: counts + 1, False),
    "a temperature": (lambda model: nn.Parameter(torch.ones(())), lambda w: w.data.add_(1), True),
    "a replay": (lambda model: deque(), lambda memory: deque([(torch.ones(2), 1)]), True),
    "metrics": (lambda model: {}, lambda metrics: {"loss": 1.0}, False),
    "what a hook has seen": (lambda model: {}, lambda seen: {"layer": torch.ones(3)}, False),
    "averages": (lambda model: {"w": W.data}, lambda mean: {"w": W.data + 1}, True),
    "a batch": (lambda model: {"x": W.data}, lambda batch: {"x": torch.ones(2)}, False),
    "a history": (lambda model: [], lambda history: [torch.ones(2)], False),
    "a number": (lambda model: 0, lambda step: step + 1, False),
    "a schedule": (
        lambda model: torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([W], lr=1.0)),
        lambda schedule: schedule.step(1.0) or schedule,
        True,
    ),
    "a generator": (lambda model: np.random.default_rng(0), drawn, True),
    "a data set": (lambda model: InMemory(torch.zeros(9)), lambda of: of.tensors[0].add_(1), False),
}
IDS, W = torch.arange(1), torch.ones(3, requires_grad=True)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_the_loop_changes_and_no_checkpoint_holds_is_named_once(accelerator, name):
    start, change, is_named = VARIABLES[name]
    model = accelerator.prepare(nn.Linear(2, 3))
    watched = Variables(accelerator, [])
    thing = start(model)
    watched.start()
    assert watched.notes() == []
    after = change(thing)
    thing = thing if name == "a temperature" else after
    notes = watched.notes()
    assert [text.startswith("note: the loop has changed `thing`, wh") for text in notes] == [
        True
    ] * is_named, notes
    assert watched.notes() == []


def test_a_generator_that_is_seeded_anew_for_each_draw_is_no_state(accelerator):
    generator = torch.Generator().manual_seed(0)
    watched = Variables(accelerator, [])
    watched.start()
    torch.rand(3, generator=generator.manual_seed(1))
    assert watched.notes() == []


class Queue:
    """Rows that the loop moves, in a checkpoint."""

    def __init__(self):
        self.rows = torch.zeros(3)

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


def test_what_something_that_is_saved_has_is_not_named(accelerator):
    model, queue = nn.Linear(2, 3), Queue()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
    sequence = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[1])
    model, optimizer, sequence = accelerator.prepare(model, optimizer, sequence)
    first, state, shared = parts[0], optimizer.optimizer.state, queue.rows
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    watched = Variables(accelerator, [queue])
    watched.start()
    for _ in range(2):
        optimizer.step()
        sequence.step()
        shared += 1
    assert watched.notes() == [] and first and state


def test_a_model_with_a_sparse_buffer_and_a_script_without_a_name_are_looked_at(accelerator):
    model = nn.Linear(2, 3)
    model.register_buffer("near", torch.eye(2).to_sparse(), persistent=False)
    accelerator.prepare(model)
    code = "slow = zeros(3)\nwatched.start()\nslow += 1\nnotes = watched.notes()"
    names = {"zeros": torch.zeros, "watched": Variables(accelerator, [])}
    exec(compile(code, "mine.py", "exec"), names)
    assert "changed `slow`, which" in names["notes"][0]


def test_the_variables_that_a_script_keeps_by_locals_stay(accelerator):
    width = 3
    settings = locals()
    Variables(accelerator, []).start()
    assert settings["width"] == width


def test_what_reads_a_file_when_it_is_asked_is_not_read(accelerator, tmp_path):
    np.savez(tmp_path / "file.npz", x=np.zeros(9))
    with np.load(tmp_path / "file.npz") as file:
        watched = Variables(accelerator, [])
        watched.start()
        assert "file" not in watched.before and file.files


def test_looking_at_variables_keeps_nothing_of_them(accelerator):
    watched = Variables(accelerator, [])
    watched.start()
    batch = nn.Linear(2, 3)
    gone = weakref.ref(batch)
    assert watched.notes() == []
    batch = None
    assert gone() is None and batch is None


def test_what_is_made_anew_between_the_steps_of_epochs_is_no_state(accelerator):
    results, predictions, hidden = None, torch.zeros(3), None
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([W], lr=1.0))
    watched = Variables(accelerator, [])
    watched.start()
    results, predictions = torch.ones(3), torch.ones(3)
    watched.start()
    assert watched.notes() == []
    hidden = results + predictions
    assert "changed `hidden`, which" in watched.notes()[0]
    schedule.step(1.0)
    watched.start()
    assert "changed `schedule`, which" in watched.notes()[0]
    assert len(hidden) == 3


class Trainer:
    """Has what it moves in itself."""

    def __init__(self, accelerator):
        self.watched, self.teacher = Variables(accelerator, []), nn.Linear(2, 3)

    def train(self):
        self.watched.start()
        moved(self.teacher)
        return self.watched.notes()


def test_what_a_trainer_of_a_script_has_is_looked_at(accelerator):
    assert "changed `self.teacher`, which" in Trainer(accelerator).train()[0]


def test_what_is_first_there_in_a_later_epoch_is_no_state(accelerator):
    watched = Variables(accelerator, [])
    watched.start()
    batch = torch.zeros(3)
    watched.start()
    batch = batch + 1
    assert watched.notes() == []


class Endless:
    """As a mock, its state is another with a state."""

    asked = 0

    def state_dict(self):
        Endless.asked += 1
        return Endless()

    def load_state_dict(self, state):
        pass


def test_a_state_of_states_is_asked_once(accelerator):
    thing = Endless()
    Variables(accelerator, []).start()
    assert Endless.asked == 1 and thing


def test_a_tensor_of_a_layer_that_is_no_buffer_is_named(accelerator):
    model = accelerator.prepare(nn.Sequential(nn.Linear(2, 3)))
    model[0].centre, model[0].last = torch.zeros(2), None
    watched = Variables(accelerator, [])
    watched.start()
    model[0].last, model[0].centre = torch.ones(2), model[0].centre + 1
    assert "`0.centre of the Sequential`, wh" in watched.notes()[0]


def test_a_schedule_that_a_checkpoint_holds_is_not_named(accelerator):
    make = torch.optim.lr_scheduler.ReduceLROnPlateau
    registered, other = (make(torch.optim.SGD([W], lr=1.0)) for _ in range(2))
    watched = Variables(accelerator, [registered])
    watched.start()
    registered.step(1.0)
    assert watched.notes() == []
    other.step(1.0)
    assert "changed `other`, which" in watched.notes()[0]


def test_what_is_registered_is_not_named(tmp_path, capfd):
    """As nothing is of a loop without such a variable."""
    teacher = nn.Linear(2, 4)
    line = r"\1run.accelerator.register_for_checkpointing(teacher)\n\1run.begin("
    moving = r"^( +)losses.append", r"\1moved(teacher)\n\g<0>"
    names = {"teacher": teacher, "moved": moved}
    changed((r"^( +)run.begin\(", line), moving, **names)(f"--epochs 1 --run-dir {tmp_path}/a")
    assert "note: the loop" not in capfd.readouterr().out
    changed(moving, **names)(f"--epochs 1 --run-dir {tmp_path}/b")
    assert "note: the loop has changed `teacher`, which no" in capfd.readouterr().out


SUMMED = '''"""A regression with a variable whose state is that of all processes."""

import train_regression
from accelerate.utils import gather_object


class Summed:
    def state_dict(self):
        return {"num": sum(gather_object([1]))}

    def load_state_dict(self, state):
        pass


def main(argv):
    train_regression.summed = Summed()
    train_regression.main(argv)
'''


def test_a_state_that_the_processes_gather_is_looked_at_by_all_of_them(tmp_path, fork_main):
    flags = f"--num-samples 64 --epochs 1 --timeout 5 --no-pictures --run-dir {tmp_path}/run"
    done = fork_main(SUMMED, flags, world=2)
    assert done.codes == [0, 0], done.output
    assert "2 processes on cpu" in done.stdout and "note:" not in done.stdout


ASKED = """
def main(watched, thing):
    SHOWN
    for epoch in range(2):
        watched.start()
        watched.notes()
    made = thing()
    watched.notes()
"""


def test_processes_with_other_variables_ask_equally_often_for_a_state(accelerator):
    """As the main process, which alone has what it shows: a state_dict() may wait for all."""

    class Thing:
        num_asked = 0

        def state_dict(self):
            Thing.num_asked += 1
            return {}

        def load_state_dict(self, state):
            pass

    asked = []
    for shown in ("shown = torch.zeros(3)", "pass"):
        scope = {"__name__": "mine", "torch": torch}
        exec(compile(ASKED.replace("SHOWN", shown), "mine.py", "exec"), scope)
        Thing.num_asked = 0
        scope["main"](Variables(accelerator, []), Thing)
        asked.append(Thing.num_asked)
    assert asked[0] == asked[1] > 0
