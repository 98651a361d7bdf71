"""run.state comes back as it was, is equal on all processes, and follows whole steps."""

import re
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import sharded
import torch
from conftest import assert_same_bytes, refused, rows
from loops import HEAD, changed

from trainkit.checkpoints.parts import load_tree, save_tree
from trainkit.checkpoints.state import State, entries_in, where_apart

SCRIPT = (
    HEAD
    + """

def load_data(config):
    x = torch.randn(61, 4, generator=torch.Generator().manual_seed(0))
    return InMemory(x[20:], x[20:].sum(1)), InMemory(x[:20], x[:20].sum(1))


def main(argv=None):
    config = parse(Config, argv)
    with Run(config, "state") as run:
        accelerator = run.accelerator
        train_set, eval_set = run.load(load_data)
        loaders = make_loaders(accelerator, train_set, eval_set, config)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(net.parameters(), 0.02)
        model, optimizer, train_loader, eval_loader = accelerator.prepare(net, optimizer, *loaders)
        run.begin(model, {"script": "state"})
        state = run.state
        state["price"], state["count"] = 1.0, np.zeros(3)  # of a new run
        seen = state.setdefault("seen", deque(maxlen=5))
        history = state.setdefault("history", [])
        table = state.setdefault("table", torch.zeros(len(train_set), 2))
        state.setdefault("pair", (torch.zeros(()), None, {"a": [1, (2, 3)]}))

        def predict(batch):
            return model(batch[0]).squeeze(1)

        for epoch in run.epochs():
            if run.starts_epoch:  # a resume in the middle must not mine with later weights
                state["hard"] = run.predict(eval_loader, predict).topk(3).values.clone()
            hard = state["hard"].mean()
            for x, y, i in run.steps(train_loader):
                with accelerator.accumulate(model):
                    out = predict((x,))
                    losses = (out - y) ** 2 * (1 + 0.1 * sum(seen)) + 0.1 * state["price"] * out**2
                    losses = losses + 0.01 * (out - table[i, 0] - hard - state["pair"][0]) ** 2
                    accelerator.backward(run.step_mean(losses))
                    optimizer.step()
                    optimizer.zero_grad()
                run.put(table, i, torch.stack((out, losses), 1))
                cost, both = run.mean(out), run.mean(torch.stack((out, losses), 1))
                if accelerator.sync_gradients:
                    state["price"] += 0.3 * (cost.item() - 0.1)
                    state["count"] += 1
                    seen.append(cost.item() * 0.1)
                    history.append(state["price"])
                    state["pair"] = (both.mean(), None, {"a": [*state["pair"][2]["a"], 1][-4:]})
                run.add(loss=losses)
                if run.end_step():
                    run.save()
                if run.progress.step == KILL:
                    os.kill(os.getpid(), signal.SIGKILL)
            metrics = run.evaluate(eval_loader, lambda b: {"loss": (predict(b) - b[1]) ** 2})
            run.end_epoch({**metrics, "eval_price": history[-1], "eval_seen": len(history)})
        return run.finish()
"""
)
FLAGS = "--log-every 1 --no-pictures --save-every 4"


def test_a_resume_in_the_middle_of_an_epoch_ends_with_the_same_bytes(fork_main, tmp_path):
    """In two processes, whose numbers are those of one process, with micro-batches too."""
    world: dict[str, Any] = {"world": 2, "env": sharded.env(sharded.SHARDED)}
    for name, kill, more in (
        ("whole", -1, ""),
        ("killed", 10, ""),
        ("killed", -1, " --resume auto"),
    ):
        flags = f"{FLAGS} --run-dir {tmp_path}/{name}{more}"
        outcome = fork_main(SCRIPT, flags, given={"KILL": kill}, **world)
        assert set(outcome.codes) == {-9 if kill > 0 else 0}, outcome.output
    assert_same_bytes(tmp_path / "whole", tmp_path / "killed")
    one = f"{FLAGS} --accumulate 2 --run-dir {tmp_path}/one"
    fork_main(SCRIPT, one, given={"KILL": -1}).finished()
    for row, same in zip(rows(tmp_path / "one"), rows(tmp_path / "whole"), strict=True):
        assert row == pytest.approx(same, rel=1e-4)
    assert row["eval_seen"] == 12


def test_a_state_comes_back_with_its_types_and_into_what_the_script_has(tmp_path):
    tensor, array, inner = torch.ones(2).bfloat16(), np.arange(3, dtype=np.int16), [1, {"a": ()}]
    state = State()
    state.values |= {"hidden": (tensor, None), "n": np.float32(2.5), "tally": Counter("aab")}
    state.values |= {"seen": deque([array, float("-inf")], maxlen=3), "in": inner, "empty": [{}]}
    state.values |= {"deep": {("x", 1): True, 3: deque([deque()])}}
    before = repr(state.values)
    state.note()
    save_tree(state.state_dict(), tmp_path / "file")
    saved = load_tree(tmp_path / "file")
    new = State()
    new.load_state_dict(saved)
    assert repr(new.values) == before
    seen = state.values["seen"]
    tensor += 1
    array += 1
    inner[1]["a"] = 5
    seen.append(3)
    with pytest.raises(RuntimeError, match=r"run.state was changed after it, and"):
        state.check_unchanged("it", "so")
    state.values["later"] = 1
    state.load_state_dict(saved)
    assert state.values.pop("later") == 1 and repr(state.values) == before
    assert state.values["hidden"][0] is tensor and seen[0] is array
    assert state.values["seen"] is seen and state.values["in"] is inner


@pytest.mark.parametrize(
    "value, sentence",
    [
        ({1}, "is a set that no checkpoint holds"),
        (torch.ones(1, requires_grad=True) * 2, "has a gradient"),
        (np.array([{}]), "is a ndarray that no"),
        (torch.eye(2).to_sparse(), "is a Tensor that no"),
        ({object(): 1}, "is a dict that no"),
    ],
)
def test_what_no_checkpoint_holds_is_refused_by_its_place(value, sentence):
    state = State()
    state.values["x"] = [value]
    with refused(rf"^run.state\['x'\]\[0\] {sentence}"):
        state.check()


@pytest.mark.parametrize(
    "own, other, sentence",
    [
        (0.31, 0.29, r"^run.state\['x'\] is 0.31 in process 0 and 0.29 in process 1, and"),
        ([torch.ones(2, 3)], [torch.zeros(2, 3)], r"\['x'\]\[0\] is ..torch.float32., .2, 3., ."),
        ({1: "a"}, {}, r"^run.state\['x'\] is a dict of 1 in process 0 and a dict of 0 in"),
        ((), [], "is a tuple of 0 in process 0 and a list of 0"),
    ],
)
def test_where_processes_are_apart_is_named(own, other, sentence):
    entries = [entries_in({"x": value}, "run.state") for value in (own, other)]
    assert re.search(sentence, where_apart(entries))


def test_a_value_of_one_process_ends_the_run_at_the_next_save(fork_main, tmp_path):
    own = SCRIPT.replace("cost.item() * 0.1", "out.sum().item()")
    assert own != SCRIPT
    outcome = fork_main(own, f"{FLAGS} --run-dir {tmp_path}/run", given={"KILL": -1}, world=2)
    assert outcome.codes[0] == 1
    assert "error: run.state['seen'][0] is " in outcome.output, outcome.output
    assert "as run.mean(values) returns it" in outcome.output


def in_loop(line: str, after: str = r"^( +)for batch in"):
    return changed((after, rf"\1{line}\n\g<0>"))


@pytest.mark.parametrize(
    "train, sentence",
    [
        (in_loop("run.state['n'] = run.state.get('n', 0) + 1"), "after the start of an epoch"),
        (in_loop("run.state['n'] = 1", r"^( +)metrics = "), "after the last step, and"),
        (
            changed((r"^( +)run.end_epoch.*", r"\g<0>\n\1run.state['x'] = 1")),
            r"after run.end_epoch\(...\), and",
        ),
        (
            changed((r"run.save\(\)", "run.save(); run.state['x'] = 1")),
            r"run.state is out of order",
        ),
    ],
)
def test_a_change_that_a_resume_would_lose_or_repeat_is_refused(tmp_path, train, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        train(f"--save-every 2 --run-dir {tmp_path}/run")


def test_what_is_set_for_a_new_run_does_not_replace_what_a_checkpoint_has(tmp_path):
    """Also after the end of an epoch, where nothing else is loaded a second time."""
    counting = (
        (r"^( +)for _ in run.epochs", r"\1run.state['n'] = 0\n\g<0>"),
        (r"^( +)if run.end_step\(\)", r"\1run.state['n'] += 1\n\g<0>"),
    )
    flags = f"--save-every 100 --keep-best eval_loss --run-dir {tmp_path}/run"
    with pytest.raises(KeyboardInterrupt):
        changed(*counting, (r"^( +)run.end_epoch.*", r"\g<0>\n\1raise KeyboardInterrupt"))(flags)
    counted = changed(
        *counting, (r"^( +)run.finish\(\)", r"\1run.finish()\n\1return run.state['n']")
    )
    assert counted(f"{flags} --resume auto") == 12


@pytest.mark.parametrize(
    "edit, sentence",
    [
        ("run.mean(loss)", None),
        ("run.mean(loss) + 1", "use what it returns inside `if accelerator.sync_gradients:`"),
        ("if run.mean(loss): pass", "use what it returns inside"),
        ("if run.accelerator.sync_gradients: run.mean(loss)", "was called in 1 of the 2 micro"),
        ("run.mean(loss.mean())", "got a single number for a batch of"),
    ],
)
def test_the_mean_of_a_step_cannot_be_misread(tmp_path, edit, sentence):
    train = changed((r"^( +)run.add\(loss=loss\)", rf"\g<0>\n\1{edit}"))
    flags = f"--accumulate 2 --run-dir {tmp_path}/run"
    if sentence is None:
        train(flags)
        return
    with pytest.raises(RuntimeError, match=sentence):
        train(flags)
