"""Optimizers and layers of others: they train in every world, resume to the byte, or are named."""

from functools import partial

import pytest
import sharded
import torch
from conftest import assert_same_bytes, forget_accelerator, rows, saved
from loops import HEAD, changed
from torch import nn

from trainkit.run.ema import EMA

SCRIPT = (
    HEAD
    + """

class Averaging(torch.optim.SGD):  # its eval() and train() only round to each other
    def move(self, weight, is_shown):
        for group in self.param_groups:
            if group.get("is_shown", False) == is_shown:
                continue
            group["is_shown"] = is_shown
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight)

    def eval(self):
        self.move(0.3, True)

    def train(self):
        self.move(1 - 1 / 0.7, False)

    def step(self, closure=None):
        assert not self.param_groups[0].get("is_shown", False)
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            z = self.state[p].setdefault("z", p.detach().clone())
            z.lerp_(p.detach(), 0.1)


def load_data(config):
    x = torch.randn(61, 4, generator=torch.Generator().manual_seed(0))
    return InMemory(x[20:], x[20:, :3].argmax(1)), InMemory(x[:20], x[:20, :3].argmax(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
        self.words = nn.Embedding(20, 8, sparse=CASE == "dense")

    def forward(self, x):
        return self.b(torch.relu(self.a(x)) + self.words((x[:, 0].abs() * 10).long().clamp(max=19)))


def main(argv=None):
    config = parse(Config, argv)
    with Run(config, "others") as run:
        accelerator = run.accelerator
        train_set, eval_set = run.load(load_data)
        loaders = make_loaders(accelerator, train_set, eval_set, config)
        net = Net()
        one, two = [*net.a.parameters(), *net.b.parameters()], [*net.words.parameters()]
        if CASE == "dense":  # its embedding has sparse gradients, and a rate is a tensor
            first = torch.optim.AdamW(one, torch.tensor(0.01), foreach=False)
            second = torch.optim.SGD(two, 0.1)
        else:
            first, second = Averaging(one, 0.1), torch.optim.Adagrad(two, 0.05)
        model, first, second, train_loader, eval_loader = accelerator.prepare(
            net, first, second, *loaders
        )
        run.begin(model, {"script": "others"})

        def losses(batch):
            return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="none")}

        for epoch in run.epochs():
            if CASE != "dense":
                first.train()
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    values = losses(batch)
                    accelerator.backward(run.step_mean(values["loss"]))
                    for optimizer in (first, second):
                        optimizer.step()
                        optimizer.zero_grad()
                run.add(**values)
                if run.end_step():
                    run.save()
                if run.progress.step == KILL:
                    os.kill(os.getpid(), signal.SIGKILL)
            metrics = run.evaluate(eval_loader, losses)
            if CASE != "dense":
                first.train()
            if CASE == "pruned":
                with torch.no_grad():
                    [weight.mul_(weight.abs() > 0.15) for weight in model.parameters()]
            run.end_epoch(metrics)
        return run.finish()
"""
)


@pytest.mark.parametrize("case, kind", [("dense", None), ("pruned", sharded.SHARDED)])
def test_it_trains_alike_in_one_and_two_processes_and_goes_on_to_the_byte(
    fork_main, tmp_path, case, kind
):
    flags = f"--log-every 1 --save-every 4 --run-dir {tmp_path}/"
    names, two = {"CASE": case, "KILL": -1}, {"world": 2, "env": sharded.env(kind)}
    fork_main(SCRIPT, f"{flags}one", given=names).finished()
    fork_main(SCRIPT, f"{flags}two", given=names, **two).finished()
    for row, same in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert row == pytest.approx(same, rel=1e-4)
    assert fork_main(SCRIPT, f"{flags}killed", given=names | {"KILL": 10}, **two).codes == [-9, -9]
    fork_main(SCRIPT, f"{flags}killed --resume auto", given=names, **two).finished()
    assert_same_bytes(tmp_path / "two", tmp_path / "killed")


def test_what_was_evaluated_is_what_is_written(fork_main, tmp_path):
    """Though the script calls train() between its evaluation and end_epoch."""
    flags = f"--keep-best eval_loss --run-dir {tmp_path}/run"
    fork_main(SCRIPT, flags, given={"CASE": "averaging", "KILL": -1}).finished()
    weights, _ = saved(tmp_path / "run")
    x = torch.randn(61, 4, generator=torch.Generator().manual_seed(0))[:20]
    hidden = torch.relu(nn.functional.linear(x, weights["a.weight"], weights["a.bias"]))
    hidden += weights["words.weight"][(x[:, 0].abs() * 10).long().clamp(max=19)]
    logits = nn.functional.linear(hidden, weights["b.weight"], weights["b.bias"])
    loss = nn.functional.cross_entropy(logits, x[:, :3].argmax(1)).item()
    assert loss == pytest.approx(rows(tmp_path / "run", "epochs")[-1]["eval_loss"], rel=1e-6)
    outcome = fork_main(SCRIPT, f"{flags}2 --ema 0.9", given={"CASE": "averaging", "KILL": -1})
    assert outcome.codes == [2] and "error: --ema 0.9: Averaging keeps" in outcome.output


class Shown(torch.optim.SGD):
    """Its eval() and train() only round to each other."""

    def eval(self):
        self.param_groups[0]["params"][0].data.mul_(1.1)

    def train(self):
        self.param_groups[0]["params"][0].data.div_(1.1)


def test_showing_an_average_leaves_no_trace_in_the_weights(accelerator):
    layer = nn.Linear(50, 50)
    model, optimizer = accelerator.prepare(layer, Shown(layer.parameters(), 0.1))
    before = layer.weight.detach().clone()
    ema = EMA([model], None, [optimizer])
    for _ in range(2):
        with ema.trained_weights():
            assert torch.equal(layer.weight, before)
        assert not torch.equal(layer.weight, before)


class Projector:
    """Of a class that torch.load(weights_only=True) does not know."""


def test_a_state_of_a_class_of_its_own_is_refused_or_trusted(tmp_path):
    mark = (
        r"^( +)run.begin\(",
        r"\1optimizers[0].param_groups[0]['own'] = Projector()\n\1run.begin(",
    )
    train = changed(mark, Projector=Projector)
    sentence = r"holds a test_others.Projector, .* call torch.serialization.add_safe_globals"
    with pytest.raises(Exception, match=sentence):
        train(f"--run-dir {tmp_path}/refused")
    forget_accelerator()
    with torch.serialization.safe_globals([Projector]):
        train(f"--epochs 1 --run-dir {tmp_path}/trusted")
        train(f"--epochs 1 --run-dir {tmp_path}/trusted --resume auto")


@pytest.mark.parametrize("first", [nn.LazyLinear, partial(nn.Linear, 2, device="meta")])
def test_a_weight_without_values_is_named(tmp_path, first):
    with pytest.raises(Exception, match="weight of a model has no values yet: give a lazy layer"):
        changed()(f"--run-dir {tmp_path}/run", first=lambda: first(4))


class Around(torch.optim.Optimizer):
    """As timm's Lookahead: around another optimizer, and without the hooks of torch's class."""

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner, self.defaults, self.state = inner, inner.defaults, inner.state
        self.param_groups = inner.param_groups
        self.load_state_dict, self.state_dict = inner.load_state_dict, inner.state_dict

    def step(self, closure=None):
        self.inner.step()
        for weight in self.param_groups[0]["params"]:
            slow = self.inner.state[weight].setdefault("slow", weight.detach().clone())
            slow.lerp_(weight.detach(), 0.5)
            weight.data.copy_(slow)


def test_an_optimizer_around_another_one_is_resumed_to_the_byte(tmp_path):
    def kill(run, number):
        assert number != 9

    made = r"Around(make_optimizer(run.accelerator, m.parameters(), args))"
    train = changed((r"make_optimizer\(.*\) for m", f"{made} for m"), Around=Around)
    flags = "--save-every", 4, "--resume", "auto", "--run-dir"
    train(*flags, tmp_path / "whole")
    with pytest.raises(AssertionError):
        train(*flags, tmp_path / "killed", body=kill)
    train(*flags, tmp_path / "killed")
    assert_same_bytes(tmp_path / "whole", tmp_path / "killed")


class Plateau:
    """As timm's: around a schedule of torch's, which its state leaves out."""

    def __init__(self, optimizer):
        self.inner = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_schedule_within_a_registered_thing_comes_back(tmp_path):
    counts = []

    def body(run, number):
        schedule = run.checkpoints.contents.things[0].inner
        if number % 6 == 0:  # at the start of an epoch
            schedule.step(9.0)
            counts.append((number, schedule.num_bad_epochs, schedule.last_epoch))

    register = "run.accelerator.register_for_checkpointing(Plateau(optimizers[0]))"
    train = changed((r"^( +)run.begin\(", rf"\1{register}\n\1run.begin("), Plateau=Plateau)
    train("--epochs", 3, "--run-dir", tmp_path / "whole", body=body)
    whole = counts.copy()
    counts.clear()
    train("--epochs", 1, "--run-dir", tmp_path / "again", body=body)
    train("--epochs", 3, "--resume", "auto", "--run-dir", tmp_path / "again", body=body)
    assert [count[2] for count in counts] == [count[2] for count in whole] == [1, 2, 3]
