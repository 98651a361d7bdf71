"""What `Run` promises to whoever writes the loop, and to whoever ends it."""

import json
import math
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    assert_same_bytes,
    contents,
    posix_only,
    refused,
    rows,
)
from loops import changed, make_config, train
from safetensors.torch import load_file, save_file
from torch import nn

import train_regression
from trainkit.launch.processes import agree
from trainkit.numbers.means import RunningMeans, sum_and_count
from trainkit.run.plan import SHIPPED, describe_rehearsal
from trainkit.run.run import Run
from trainkit.store.rehearsals import mark_of_rehearsal


def test_a_killed_run_goes_on_with_what_the_loop_draws_to_the_same_bytes(tmp_path):
    killed_at = 6  # one batch before the end of an epoch, where none is read ahead
    drawn = []

    def draw(run, number):
        drawn.append((np.random.random(), random.random()))

    def draw_and_die(run, number):
        draw(run, number)
        if number == killed_at:
            raise KeyboardInterrupt

    flags = f"--save-every 1 --schedule cosine --run-dir {tmp_path}/"
    train(flags + "whole", body=draw)
    whole = drawn.copy()
    assert len({*whole}) == len(whole) == 12
    drawn.clear()
    with pytest.raises(KeyboardInterrupt):
        train(flags + "killed", body=draw_and_die)
    assert drawn.pop() == whole[killed_at - 1] and not (tmp_path / "killed" / "DONE").exists()
    before = {*multiprocessing.active_children()}
    train(flags + "killed --num-workers 1 --resume latest", body=draw)
    assert {*multiprocessing.active_children()} <= before  # or each takes 5 s, at some time
    assert drawn == whole
    names = ["model_1.safetensors", "predictions.safetensors"]
    assert_same_bytes(tmp_path / "killed", tmp_path / "whole", *names)


def test_stop_ends_the_run_whole_and_a_resume_ends_too(tmp_path):
    number = 3
    flags = f"--run-dir {tmp_path} --epochs 5 --save-every 100"
    losses = train(flags, body=lambda run, n: run.stop() if n == number else None)
    assert len(losses) == number
    names = "DONE", "predictions.safetensors", "model.safetensors", "metrics.jsonl"
    before = [(tmp_path / name).read_bytes() for name in names]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{number:010d}"]
    for killed in ("DONE", "model.safetensors"):
        (tmp_path / killed).unlink()  # as if killed before it was written
    assert train(flags, "--resume auto") == []
    assert before == [(tmp_path / name).read_bytes() for name in names]


IN_A_STEP = ("batch", "backward")
# The calls of a Run, and in which stages they are taken.
CALLS = [
    (lambda run: run.load(None), ["entered"]),
    (lambda run: run.begin(None, {}), ["loaded"]),
    (lambda run: next(run.epochs()), ["ready"]),
    (lambda run: next(run.steps(None)), ["epoch"]),
    (lambda run: run.step_mean(None), [*IN_A_STEP]),
    (lambda run: run.clip_and_check(), ["backward"]),
    (lambda run: run.add(), [*IN_A_STEP]),
    (lambda run: run.gather(None), [*IN_A_STEP]),
    (lambda run: run.mean(None), [*IN_A_STEP]),
    (lambda run: run.put(None, None, None), [*IN_A_STEP]),
    (lambda run: run.starts_epoch, ["epoch"]),
    (lambda run: run.stop(), [*IN_A_STEP, "trained"]),
    (lambda run: run.evaluate(None, None), ["ready", "epoch", "trained"]),
    (lambda run: run.end_step(), ["backward"]),
    (lambda run: run.save(), ["must save"]),
    (lambda run: run.end_epoch({}), ["trained"]),
    (lambda run: run.state, ["ready", "epoch", *IN_A_STEP, "trained", "over"]),
    (lambda run: run.finish(), []),
]


def test_a_call_out_of_order_is_one_sentence_at_every_stage_and_changes_nothing(tmp_path):
    stages = set()

    def look(run):
        stages.add(run.stage)
        for call, stages_that_take_it in CALLS:
            if run.stage not in stages_that_take_it:
                with pytest.raises(RuntimeError, match=r"is out of order: what comes next is "):
                    call(run)

    look(Run(make_config(), "test"))
    flags = f"--accumulate 2 --save-every 1 --run-dir {tmp_path}/"
    before_each_line = (
        r"^( +)(?=for |sets|metrics|loss =|if run|run\.(?!finish))",
        r"\1look(run)\n\1",
    )
    after_calls = r"(save|finish)\(\)$", r"\1(); look(run)"
    losses = changed(before_each_line, after_calls, look=look)(flags + "looked")
    assert len(stages) == 11
    assert losses == train(flags + "plain")


OF_A_LEFT_LOOP = r"`continue` and `break` must not .* call run.stop\(\) before run.end_step\(\)"


def test_a_batch_that_continue_skips_or_whose_loss_was_reduced_is_told_so(tmp_path):
    with pytest.raises(RuntimeError, match=r"optimizer.step.* is missing .* --accumulate N"):
        changed((r"part.step\(\)", "pass"))("--run-dir", tmp_path)
    for left in ("break", "continue"):
        cut = r"^( +)losses\.append", rf"\1{left}\n\g<0>"
        with pytest.raises(RuntimeError, match=OF_A_LEFT_LOOP):
            changed(cut)(f"--run-dir {tmp_path}")
    reduced = r"run.step_mean\(loss\)", "loss.mean()"
    with pytest.raises(RuntimeError, match=r"without accelerator.backward.* give step_mean"):
        changed(reduced)(f"--run-dir {tmp_path}")


def test_whatever_ends_the_body_signals_and_folder_are_given_back(tmp_path):
    numbers = signal.SIGINT, signal.SIGTERM
    before = [*map(signal.getsignal, numbers)]

    def fail(run, number):
        assert signal.getsignal(signal.SIGTERM) != before[1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("--run-dir", tmp_path, body=fail)
    assert [*map(signal.getsignal, numbers)] == before
    train("--run-dir", tmp_path)  # the lock is free
    assert [*map(signal.getsignal, numbers)] == before


NOISY = "--learning-rate 5 --schedule constant --num-samples 130 --epochs 6"


def test_the_best_checkpoint_is_kept_beside_the_two_newest(tmp_path, run_main):
    run_main("train_regression", f"{NOISY} --keep-best eval_loss --run-dir {tmp_path}")
    epochs, folders = rows(tmp_path, "epochs"), sorted((tmp_path / "checkpoints").iterdir())
    best = min(epochs, key=lambda row: row["eval_loss"])
    kept = [best, *epochs[-2:]]
    assert len({row["step"] for row in kept}) == 3, "this shows nothing"
    assert [path.name for path in folders] == [f"step-{row['step']:010d}" for row in kept]
    saved = load_file(folders[0] / "state/model.safetensors")
    best = load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in best.items())


def test_the_best_weights_are_those_that_the_last_sentence_names(tmp_path, run_main, capfd):
    flags = f"{NOISY} --keep 99 --run-dir {tmp_path} --keep-best"
    run_main("train_regression", f"{flags} eval_loss")
    losses = [row["eval_loss"] for row in rows(tmp_path, "epochs")]
    assert min(losses) < losses[0], "the first epoch is the best: this shows nothing"
    first = min((tmp_path / "checkpoints").glob("step-*"))
    capfd.readouterr()
    more = f"--stop-after-steps {int(first.name[5:]) + 1} --resume"
    run_main("train_regression", f"{flags} eval_loss {more} {first}")
    said = capfd.readouterr().out
    assert f"was best at step {int(first.name[5:])}" in said, said
    assert "those weights are in best.safetensors" in said  # a resume evaluates its step again
    best, written = tmp_path / "best.safetensors", load_file(first / "state/model.safetensors")
    assert all(torch.equal(written[name], x) for name, x in load_file(best).items())
    save_file(written, best, {"trainkit": '{"step": 1}'})
    run_main("train_regression", f"{flags} eval_loss {more} auto")
    assert f"those weights are in checkpoints/{first.name}" in capfd.readouterr().out
    assert (tmp_path / "abandoned-best.safetensors").exists()


def test_a_metric_that_is_not_a_number_is_never_the_best(tmp_path, capfd):
    def train_with(scores, flags):
        edit = r"end_epoch\(metrics", "end_epoch(metrics | {'eval_score': next(scores)}"
        changed(edit, scores=iter(scores))(f"--run-dir {tmp_path}/run {flags}")
        last = max((tmp_path / "run/checkpoints").glob("step-*")) / "trainer.json"
        return json.loads(last.read_text())["progress"]

    of_score = "--keep-best eval_score:max --epochs"
    progress = train_with([math.nan, math.inf, 0.5, -math.inf], f"{of_score} 4")
    assert progress["best"] == 0.5 and progress["best_step"] == 3 * progress["step"] // 4
    assert train_with([math.nan], f"{of_score} 1")["best"] is None
    assert "no evaluation gave a finite eval_score: nothing was kept" in capfd.readouterr().out
    with refused("--keep-best score: there are only epoch, train"):
        train_with([0.5], "--keep-best score:min")


def test_a_resume_of_something_else_is_refused_and_leaves_the_run_as_it_was(tmp_path):
    def teach(place: str, teacher: nn.Module) -> Callable[..., list[float]]:
        """A resume with a teacher; `pictures` is called like a flag that may change."""
        edit = r'\{"pictures": "test"\}', "{'pictures': place}, fixed={'teacher': teacher}"
        return changed(edit, place=place, teacher=teacher)

    flags = f"--run-dir {tmp_path}/run --resume auto "
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    teach("here", one)(flags + "--save-every 4")
    before = contents(tmp_path / "run")
    for resume, more, sentence in (
        (teach("there", one), "", r"metadata\[pictures\] is '\"here\"' there and '\"there\"' he"),
        (teach("here", other), "", r"belongs to another run: fixed\[teacher\] is"),
        (teach("here", one), "--seed 7", "seed is 0 there and 7 here"),
        (teach("here", one), "--stop-after-steps 2", "of step 12 and this run ends at step 2"),
    ):
        with refused(sentence):
            resume(flags + more)
        assert contents(tmp_path / "run") == before


def test_a_mean_over_many_batches_is_exact_also_after_a_resume(accelerator):
    means, resumed = RunningMeans(accelerator), RunningMeans(accelerator)
    for value in (2.0**24, 1.0, 1.0):  # 2**24 + 1 is none of float32
        values = torch.tensor([value])
        means.add_all([("loss", *sum_and_count("", values, dtype=means.dtype))])
        assert means.sums["loss"].dtype == torch.float64
    resumed.load(means.state())
    assert means.compute("") == resumed.compute("") == {"_loss": (2**24 + 2) / 3}


def test_each_optimizer_is_clipped_in_its_step_or_before_it_by_the_joint_norm(tmp_path):
    """Each by its own norm, whether or not the script calls clip_and_check, as older copies do."""
    for name, call in (
        ("step", "pass"),
        ("each", "[run.clip_and_check(each) for each in optimizers]"),
        ("joint", "run.clip_and_check(*optimizers)"),
    ):
        edit = r"^( +)for part in \(\*optimizers", rf"\1{call}\n\g<0>"
        flags = f"--clip-norm 0.01 --optimizer sgd --momentum 0 --run-dir {tmp_path}/{name}"
        changed(edit)(flags)
    assert_same_bytes(tmp_path / "step", tmp_path / "each")
    first = [rows(tmp_path / name)[0] for name in ("each", "joint")]
    assert ["grad_norm_1" in row for row in first] == [True, False]
    assert first[1]["grad_norm"] > first[0]["grad_norm"] > 0.01


@pytest.mark.parametrize(
    "mine, theirs, sentence",
    [
        ({"eval_auc": 0.6100004}, {"eval_auc": 0.61}, None),
        # What a process says of its half of a set is near what another one says of the other half.
        ({"eval_auc": 0.612}, {"eval_auc": 0.61}, "0.612 on process 0 and 0.61 on another"),
        ({"eval_auc": math.nan}, {"eval_auc": 0.61}, "nan on process 0 and 0.61 on another"),
        ({"eval_auc": 0.6}, {"eval_auc": None}, "got eval_auc: None: a metric must be a number"),
        ({"step": 1.0}, {"step": 1.0}, "number, and must not be called step"),
    ],
)
def test_all_processes_refuse_metrics_that_differ_or_are_no_numbers(
    accelerator, monkeypatch, mine, theirs, sentence
):
    monkeypatch.setattr(
        "trainkit.launch.processes.gather_object", lambda of_this: [*of_this, theirs]
    )
    with pytest.raises(RuntimeError, match=sentence) if sentence else ExitStack():
        assert repr(agree(accelerator, mine)) == repr(mine)


@pytest.mark.parametrize("target, code", [("eval_loss:1e9", 0), ("eval_loss:max:1e9", 3)])
def test_a_run_that_misses_its_target_is_whole_and_ends_with_3(tmp_path, capfd, target, code):
    edit = r'\{"pictures": "test"\}', "{}, {'next': 'what to do then'}"
    with pytest.raises(SystemExit) if code else ExitStack() as ended:
        changed(edit)(f"--epochs 1 --run-dir {tmp_path} --target {target}")
    assert code == 0 or ended.value.code == code
    said = capfd.readouterr().out
    assert ("eval_loss:max:1e9 is missed: eval_loss is" in said) == bool(code)
    assert (tmp_path / "DONE").exists() and "next: what to do then" in said


def test_a_script_that_no_rehearsal_has_passed_says_so_until_one_has(tmp_path, monkeypatch, capfd):
    mine = tmp_path / "mine.py"
    mine.write_text("x = 1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shipped = {path.stem for path in [*ROOT.glob("train_*.py"), *ROOT.glob("examples/*.py")]}
    assert shipped == {*SHIPPED.split()}
    assert not describe_rehearsal(ROOT / "examples/gan.py")
    line = {"not rehearsed": f"python -m trainkit.tools.rehearse {mine}"}
    assert describe_rehearsal(mine) == line
    monkeypatch.setattr(sys, "argv", [str(mine)])
    changed()(f"--epochs 1 --run-dir {tmp_path}/run")
    assert f"  {line['not rehearsed']}\n" in capfd.readouterr().out  # in the plan
    mark = mark_of_rehearsal(mine)
    mark.parent.mkdir(parents=True)
    mark.touch()
    assert not describe_rehearsal(mine)
    mine.write_text("x = 2")
    assert describe_rehearsal(mine) == line


@posix_only
def test_a_signal_in_an_evaluation_is_heard_and_a_resume_evaluates_again(tmp_path):
    num_batches = count(1)

    def interrupted(losses):
        if next(num_batches) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return losses

    killed, whole = (f"--run-dir {tmp_path}/{name} --ema 0.9" for name in ("killed", "whole"))
    with pytest.raises(SystemExit) as left:
        train(killed, change=interrupted)
    assert left.value.code == 75 and next(num_batches) == 3, "it was not heard at once"
    assert (tmp_path / "killed" / "checkpoints" / "step-0000000006").is_dir()
    train(killed, "--resume auto")
    train(whole)
    assert_same_bytes(tmp_path / "killed", tmp_path / "whole")


def test_a_run_starts_from_given_weights_by_name_and_says_what_matched(fork_main, tmp_path):
    def start(code, path, *more, world=1):
        flags = f"{NOISY} --model mlp --hidden 8 --epochs 1 --run-dir {tmp_path}/run-{code}"
        outcome = fork_main("train_regression", flags, "--start-from", path, *more, world=world)
        assert outcome.codes == [code] * world, outcome.output
        return outcome.output

    weights, wrong = tmp_path / "weights", tmp_path / "wrong"
    before = train_regression.MLP(10, 1, [8]).state_dict()
    save_file(before, weights)
    said = start(0, weights, "--num-targets 2", world=2)
    matched = "2 of 4 tensors matched; left as initialised: 2.weight, 2.bias; not used: 2."
    assert said.count(matched) == 1, said
    start(0, weights, "--learning-rate 1e-30")
    after = load_file(tmp_path / "run-0" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    save_file({"0.weight": torch.ones((8, 10), dtype=torch.int64), "x": torch.ones(1)}, wrong)
    for path, sentence in ((tmp_path / "none", "cannot be read"), (wrong, "none of its 2")):
        assert sentence in start(2, path)
        assert not (tmp_path / "run-2").exists()
