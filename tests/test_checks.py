"""What a run says of a data set or a function that would give misleading numbers, and what not."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from loops import Numbers, changed
from torch import nn
from torch.utils.data import Dataset

from trainkit.errors import UsageError, advise, explain
from trainkit.launch.alike import check_same
from trainkit.numbers.loaders import EpochBatches, InMemory
from trainkit.run.buffers import Buffers
from trainkit.run.data import check_indexable
from trainkit.run.losses import Losses, Share, first_numbers, single_value, uses
from trainkit.run.outer import check_outer
from trainkit.run.prepared import check_batch_norm

NUM = 16


def tables() -> dict[str, tuple[torch.Tensor, bool]]:
    """Values (n, n) and (n,) by name, and whether they come of (n, 1) against (n,)."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(NUM, size, generator=generator) for size in (10, NUM))
    torch.manual_seed(0)
    one, many, rows = nn.Linear(10, 1)(x), nn.Linear(10, NUM)(x), nn.Linear(10, 4)(x)
    target, labels = y[:, 0], torch.randint(3, (2, NUM), generator=generator)
    signs = 2 * torch.eye(NUM) - 1
    few_wrong = torch.ones(NUM, NUM, dtype=torch.bool)
    few_wrong[3] = False
    few_wrong[0, 5] = False
    wrong = {
        "mse": (one - target) ** 2,
        "the other way round": (one[:, 0] - target[:, None]) ** 2,
        "hidden in a mean": ((one - target) ** 2).mean(1),
        "huber": F.huber_loss(one.expand(NUM, NUM), target.expand(NUM, NUM), reduction="none"),
        "normal": -torch.distributions.Normal(one, 1.0).log_prob(target),
        "mse without a graph": (one.detach() - target) ** 2,
        "mae without a graph": (one.detach() - target).abs(),
        "accuracy": labels[0][:, None] == labels[1],
        "accuracy as floats": (labels[0][:, None] == labels[1]).float(),
        "error rate": labels[0][:, None] != labels[1],
    }
    right = {
        "as many outputs": (many - y) ** 2,
        "their means": ((many - y) ** 2).mean(1),
        "weighted": torch.rand(NUM, 1) * (many - y) ** 2,
        "pairs": -F.logsigmoid(signs * (rows @ rows.T)),
        "contrastive": F.cross_entropy(rows @ rows.T, torch.arange(NUM), reduction="none"),
        "ranking": F.softplus(one.T - one),
        "squeezed": (one[:, 0] - target) ** 2,
        "outputs without a graph": (many.detach() - y) ** 2,
        "accuracy of outputs": (many > 0) == (y > 0),
        "all right": torch.ones(NUM, NUM),
        "few wrong": few_wrong,
    }
    named = {name: (values, True) for name, values in wrong.items()}
    return named | {name: (values, False) for name, values in right.items()}


@pytest.mark.parametrize("name", tables())
def test_values_of_predictions_broadcast_against_targets_are_told_from_others(name):
    values, is_wrong = tables()[name]
    if not is_wrong:
        return check_outer("it", values)
    with pytest.raises(RuntimeError, match=r"it got .* \(16, 16\): .* predictions.squeeze\(1\)"):
        check_outer("it", values)


def test_a_loss_and_a_metric_that_broadcast_are_refused_where_they_are_given(tmp_path):
    flags = f"--batch-size 20 --run-dir {tmp_path}"
    square = r'\(two\(one\(batch\["x"\]\)\) - batch\["y"\]\)\.square\(\)'
    for text, other, call in (
        (rf"loss = {square}", "loss = (two(one(batch['x'])) - batch['y'][:, 0]) ** 2", "step_mean"),
        (
            r"run.add\(loss=loss\)",
            "run.add(loss=loss, right=(batch['index'] % 3)[:, None] == batch['index'] % 3)",
            r"add\(right=\.\.\.\)",
        ),
        (
            r'lambda batch: {"loss": ',
            "lambda batch: {'off': (one(batch['x'])[:, :1] - batch['y'][:, 0]).abs(), 'loss': ",
            "evaluate",
        ),
    ):
        with pytest.raises(RuntimeError, match=rf"run\.{call}.* were broadcast"):
            changed((text, other))(flags)


@pytest.mark.parametrize(
    "function, note",
    [
        ("F.dropout(batch['y'], 0.5)", "random numbers"),
        ("F.dropout(batch['y'], 0.5, training=one.training)", ""),
        ("torch.nn.Dropout(0.5).eval()(batch['y'])", ""),
        ("batch['y'] * run.num_samples", ""),
    ],
)
def test_a_function_of_an_evaluation_that_draws_is_named_once(tmp_path, capfd, function, note):
    edit = r'lambda batch: {"loss": ', "lambda batch: {'other': " + function + ", 'loss': "
    changed(edit, F=F)("--run-dir", tmp_path)
    said = capfd.readouterr().out
    assert said.count("note: the function of run.evaluate(...) draws") == bool(note), said


def test_a_model_put_into_training_mode_in_an_evaluation_is_refused(tmp_path):
    edit = r'lambda batch: {"loss": ', "lambda batch: {'other': one.train()(batch['x']), 'loss': "
    with pytest.raises(RuntimeError, match=r"its function called model.train\(\), so dropout"):
        changed(edit)("--run-dir", tmp_path)


A_TERM, A_FACTOR, ONE_NUMBER = "the loss has a term", "by a factor", "got one number"


@pytest.mark.parametrize(
    "total, note",
    [
        ("run.step_mean(loss) + 0.1 * one(batch['x']).square().mean()", A_TERM),
        ("run.step_mean(loss) + 0.1 * one.weight.square().sum() + one.bias.norm()", ""),
        ("run.step_mean(loss).sqrt()", A_FACTOR),
        ("run.step_mean(loss) * batch['y'].std()", A_FACTOR),
        ("(-one.bias[0]).exp() * run.step_mean(loss) + run.step_mean(loss.sqrt()) / 3", ""),
        ("run.step_mean(loss.mean().repeat(len(loss)))", ONE_NUMBER),
        ("run.step_mean(0 * loss + one.weight.square().sum())", ""),
        ("run.step_mean(loss * run.step_mean(loss).detach())", ""),
    ],
)
def test_what_a_loss_has_of_a_share_beside_its_means_is_named_once(tmp_path, capfd, total, note):
    """The last one is a factor of the share as well, but nothing shows it."""
    changed((r"run.step_mean\(loss\)", total))(f"--accumulate 2 --run-dir {tmp_path}")
    said = capfd.readouterr().out
    assert said.count("note: ") == bool(note) and note in said, said


def test_several_backward_passes_and_gradients_of_the_script_are_no_factors(tmp_path, capfd):
    passes = (
        "run.accelerator.backward(2 * run.step_mean(loss.abs()), retain_graph=True)",
        "(rate,) = torch.autograd.grad(run.step_mean(loss), one.bias, retain_graph=True)",
        "run.accelerator.backward(run.step_mean(loss) + 0 * rate.sum())",
    )
    edit = r"run.accelerator.backward\(run.step_mean\(loss\)\)", "; ".join(passes)
    changed(edit)(f"--accumulate 2 --run-dir {tmp_path}")
    assert "note: " not in capfd.readouterr().out


def test_a_loss_uses_the_weights_that_get_a_gradient_from_it():
    one, two = nn.Linear(2, 3), nn.Linear(3, 1)
    hidden = one(torch.ones(1, 2))
    for loss, used in (two(hidden).sum(), {one, two}), (two(hidden.detach()).sum(), {two}):
        assert {model for model in (one, two) if uses(loss, [*model.parameters()])} == used
    assert not uses(torch.ones(()), [one.weight])


def test_the_first_numbers_of_a_process_without_rows_are_none():
    assert first_numbers([nn.Parameter(torch.empty(0, 3))]).shape == (0,)
    assert first_numbers([nn.Parameter(torch.ones(2, 3))]).tolist() == [1]


def test_values_without_elements_have_no_single_value():
    assert math.isnan(single_value(torch.empty(3, 0)))
    assert single_value(torch.ones(3, 2)) == 1


@pytest.mark.parametrize("num_micro_batches, num_looks", [(1, 1), (2, 2)])
def test_numbers_of_a_loss_are_read_rarely_and_not_in_float64(
    monkeypatch, num_micro_batches, num_looks
):
    """MPS has no float64, and each look waits for the device: at a mean, its flow and the loss.

    The flow is looked at once more where a loss may have been divided by --accumulate.
    """
    losses, looks = Losses(SimpleNamespace(num_processes=1, scaler=None), [], 2, print), []
    mean = torch.tensor(2.0, requires_grad=True) * 1
    losses.watch_mean(mean, torch.ones(1))
    losses.note_backward(mean / 3)
    (mean / 3).backward()
    losses.end_backward()
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: looks.append(1) or item(tensor))
    monkeypatch.setattr(torch.Tensor, "double", None)
    losses.finish_micro_batch(num_micro_batches)
    assert len(looks) == 2 + num_looks


def test_losses_of_several_processes_are_compared(monkeypatch):
    said = []
    two = SimpleNamespace(num_processes=2, scaler=None)
    losses = Losses(two, [], 1, said.append)
    monkeypatch.setattr(
        "trainkit.run.losses.gather_object",
        lambda own: [*own, Share([1.0], [0.5], [3e-5], [float("nan")])],
    )
    for penalty in (0.5, 0.4):
        mean = torch.tensor(2.0, requires_grad=True) * 1
        losses.watch_mean(mean, torch.ones(1))
        losses.note_backward(mean + penalty)
        (mean + penalty).backward()
        losses.end_backward()
        losses.finish_micro_batch(1)
        losses.finish_step()
        assert len(said) == (penalty != 0.5), said
    assert "0.4 of one share of the batch and 0.5 of another" in said[0]


class Tracked(nn.Linear):
    """A layer with a buffer that forward changes as `how` says."""

    def __init__(self, how: str):
        super().__init__(2, 4)
        self.how = how
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("num", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num += 1
        if self.training and self.how == "share":
            self.mean.lerp_(x.detach().mean(0), 0.1)
        if self.how == "replaced":
            self.mean = self.mean + 1
        return super().forward(x)


@pytest.mark.parametrize(
    "how, accumulate, num",
    [
        ("share", 1, 0),
        ("share", 2, 1),
        ("replaced", 2, 1),
        ("counted alone", 2, 0),
    ],
)
def test_a_buffer_that_moves_in_each_micro_batch_is_named_once(
    tmp_path, capfd, how, accumulate, num
):
    changed((r"first\(\)", "Tracked(how)"), Tracked=Tracked, how=how)(
        f"--accumulate {accumulate} --run-dir {tmp_path}"
    )
    note = "note: mean: the numbers depend on how a batch is split, because forward changes it in"
    said = capfd.readouterr().out
    assert said.count(note) == num == said.count("note"), said


@pytest.mark.parametrize(
    "when, accumulate, num",
    [("True", 2, 1), ("True", 1, 0), ("run.accelerator.sync_gradients", 2, 0)],
)
def test_a_registered_teacher_that_moves_in_each_micro_batch_is_named_once(
    tmp_path, capfd, when, accumulate, num
):
    teacher = nn.Linear(2, 4)
    line = r"\1run.accelerator.register_for_checkpointing(teacher)\n\1run.begin("
    follow = rf"\1if {when}: teacher.weight.data.lerp_(one.weight.data, 0.1)\n\g<0>"
    edits = (r"^( +)run.begin\(", line), (r"^( +)losses.append", follow)
    changed(*edits, teacher=teacher)(f"--accumulate {accumulate} --run-dir {tmp_path}")
    said = capfd.readouterr().out
    note = "note: the loop changes the registered Linear in each micro-batch of --accumulate 2"
    assert said.count(note) == num == said.count("note: "), said


@pytest.mark.parametrize("theirs, named", [(0.5, True), (1.0 + 1e-8, False)])
def test_a_buffer_that_differs_between_processes_is_named(monkeypatch, theirs, named):
    layer, said = nn.Module(), []
    layer.register_buffer("load", torch.ones(()))
    two = SimpleNamespace(num_processes=2, is_fsdp2=False)
    monkeypatch.setattr("trainkit.run.buffers.gather_object", lambda own: [*own, {"load": theirs}])
    buffers = Buffers(two, [layer], 1, said.append)
    buffers.start_micro_batch()
    buffers.finish_micro_batch()
    buffers.finish_step()
    assert [text.startswith("note: load: ") for text in said] == [True] * named
    assert all("add up over the processes" in text for text in said)


class Pooled(nn.Linear):
    """A model of sequences that differ in length."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.stack([row.sum(0) for row in rows.unbind()]))


def test_batch_norm_of_a_single_sample_is_a_sentence():
    with pytest.raises(ValueError) as raised:
        nn.BatchNorm1d(2)(torch.ones(1, 2))
    assert "use --drop-last or another --batch-size" in str(explain(raised.value))


@pytest.mark.parametrize("layout", ["torch.jagged", "torch.strided"])
def test_a_batch_may_hold_nested_tensors(tmp_path, layout):
    def collate(samples: list) -> dict[str, torch.Tensor]:
        rows = [sample["x"].expand(1 + sample["index"] % 3, 2) for sample in samples]
        nested = torch.nested.nested_tensor(rows, layout=getattr(torch, layout[6:]))
        return {"x": nested, "y": torch.stack([sample["y"] for sample in samples])}

    losses = changed(
        (r"\*sets, args\)", "*sets, args, collate)"),
        (r"first\(\)", "Pooled(2, 4)"),
        collate=collate,
        Pooled=Pooled,
    )(f"--epochs 2 --accumulate 2 --run-dir {tmp_path}")
    assert losses[-1] < losses[0]


def test_schedules_of_timm_are_known_when_they_are_registered(tmp_path):
    class Foreign:
        def __init__(self, optimizer: torch.optim.Optimizer):
            self.optimizer = optimizer
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]

        def state_dict(self) -> dict[str, float]:
            return {}

        def load_state_dict(self, state: dict[str, float]) -> None:
            pass

    edits = (
        (r"schedules = \[make_scheduler.*", "foreign = [Foreign(each) for each in optimizers]"),
        (r"schedules = \[run.accelerator.prepare.*", "schedules = []"),
    )
    with pytest.raises(RuntimeError, match=r"not torch's, .*register_for_checkpointing"):
        changed(*edits, Foreign=Foreign)(f"--run-dir {tmp_path}")


@pytest.mark.parametrize(
    "nodes, values, sentence",
    [
        (
            "aabb",
            "1122",
            "the nodes of this run differ: x is 1 on a, and 2 on b: start all of them",
        ),
        (
            "aaaa",
            "1121",
            "the processes of this run differ: x is 1 on process 0, and 2 on process 2: let",
        ),
        (
            "aabb",
            "1112",
            "the processes of this run differ: x is 1 on process 0, and 2 on process 3: let",
        ),
    ],
)
def test_what_differs_is_said_of_nodes_only_if_they_are_of_one_mind(
    accelerator, monkeypatch, nodes, values, sentence
):
    everybody = [(node, {"x": value}) for node, value in zip(nodes, values, strict=True)]
    monkeypatch.setattr("trainkit.launch.alike.gather_object", lambda _: everybody)
    with pytest.raises(UsageError, match=sentence):
        check_same(accelerator, {"x": 1})


def test_synchronised_batch_norm_on_cpus_is_one_sentence(accelerator):
    models = [nn.Sequential(nn.SyncBatchNorm(2))]
    check_batch_norm(accelerator, models)
    two = SimpleNamespace(num_processes=2, device=accelerator.device)
    with pytest.raises(UsageError, match=r"SyncBatchNorm computes on GPUs alone, and .* 2 proc"):
        check_batch_norm(two, models)
    check_batch_norm(two, [models[0].eval()])
    error = ValueError("SyncBatchNorm layers only work with GPU modules")  # of DDP, before that
    assert "SyncBatchNorm computes on GPUs alone" in str(advise(error))


class Own(Dataset):
    """Samples that are made when they are read."""

    def __init__(self, rows: torch.Tensor, noise: float = 0.0):
        self.rows, self.noise = rows, noise

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = self.noise * torch.randn(2) if self.noise else 0
        return {"x": self.rows[index] + noise, "y": self.rows[index, :1]}


@pytest.mark.parametrize("held", ["Own({})", "[{{'x': x, 'y': x[:1]}} for x in {}]"])
@pytest.mark.parametrize("start, note", [(43, ""), (38, "about 17 %"), (13, "about 100 %")])
def test_an_evaluation_set_that_is_trained_on_is_named(tmp_path, capfd, held, start, note):
    rows = torch.randn(73, 2)
    sets = f"({held.format('rows[:43]')}, {held.format(f'rows[{start}:{start + 30}]')})"
    edit = r"\(Numbers\(\), Numbers\(\)\)", sets
    changed(edit, Own=Own, rows=rows)(f"--epochs 1 --run-dir {tmp_path}")
    said = re.findall("same samples +(about .* %) of the evaluation set", capfd.readouterr().out)
    assert said == [note] * bool(note)


def test_equal_rows_in_the_nature_of_the_data_are_not_named_nor_those_of_other_tensors():
    from trainkit.run.shared_rows import shared_rows, texts_in_memory

    def said(train: InMemory, evaluated: InMemory) -> dict[str, str]:
        texts = texts_in_memory(train, 1024), texts_in_memory(evaluated, 256)
        return shared_rows(texts[0], len(train), texts[1])

    few, many = torch.arange(2000)[:, None] % 4, torch.randn(5000, 3)
    assert said(InMemory(few, few), InMemory(few[:100], few[:100])) == {}
    assert said(InMemory(many), InMemory(many + 1)) == {}
    assert "about" in said(InMemory(many), InMemory(many[:1000]))["same samples"]


@pytest.mark.parametrize("noise, num", [(0.0, 0), (0.5, 1)])
def test_an_evaluation_set_that_is_augmented_is_named(tmp_path, capfd, noise, num):
    sets = r"\(Numbers\(\), Numbers\(\)\)", "(Numbers(), Own(torch.randn(30, 2), noise))"
    changed(sets, Own=Own, Numbers=Numbers, noise=noise)(f"--epochs 1 --run-dir {tmp_path}")
    assert capfd.readouterr().out.count("] of a sample of the evaluation set depends") == num


def test_no_process_of_an_evaluation_has_padding_if_the_set_has_enough_samples():
    for num, world, share in ((51, 2, 5), (7, 3, 2), (40, 3, 4), (6, 3, 2), (2, 3, 2), (4, 3, 1)):
        size = world * share
        batches = EpochBatches(num, size, num_processes=world)
        spans = [*batches.spans()]
        assert [place for span in spans for place in span] == [*range(num)]
        assert [len(slots.values) for slots in batches] == [*map(len, spans)]
        assert len(spans) == len(batches) == -(-num // size)
        if num >= world and share > 1:
            assert min(map(len, spans)) >= world


METRIC = """
import torch
from trainkit import InMemory, Run, make_loaders, make_optimizer
from trainkit.config import TrainingConfig, parse
def main(argv):
    config = parse(TrainingConfig, argv)
    with Run(config, "metric") as run:
        rows, seen = torch.rand(43, 1), []
        sets = run.load(lambda _: (InMemory(rows), InMemory(1 - rows)))
        train_loader, eval_loader = make_loaders(run.accelerator, *sets, config)
        model = torch.nn.Linear(1, 1)
        optimizer = make_optimizer(run.accelerator, model.parameters(), config)
        model, optimizer, train_loader, eval_loader = run.accelerator.prepare(
            model, optimizer, train_loader, eval_loader
        )
        run.begin(model, {})
        def update(batch):
            assert run.num_samples == len(batch[1])
            seen.extend(batch[1].tolist())
            return {"loss": model(batch[0]).abs()}
        for _ in run.epochs():
            for x, _ in run.steps(train_loader):
                with run.accelerator.accumulate(model):
                    run.accelerator.backward(run.step_mean(model(x).abs()))
                    run.clip_and_check(optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
                if run.end_step():
                    run.save()
            run.end_epoch(run.evaluate(eval_loader, update))
        print(f"seen {seen}.")
        run.finish()
"""


def test_a_metric_that_the_function_itself_updates_sees_each_sample_once(fork_main, tmp_path):
    path = tmp_path / "metric.py"
    path.write_text(METRIC)
    flags = f"--epochs 1 --batch-size 8 --eval-batch-size 6 --no-pictures --run-dir {tmp_path}/run"
    output = fork_main(path, flags, world=2).finished()  # 43: the last batch would have 1
    seen = [int(n) for part in re.findall(r"seen \[(.*?)\]\.", output) for n in part.split(",")]
    assert sorted(seen) == [*range(43)], output


def test_a_set_that_only_makes_whole_batches_is_read_by_index():
    class Whole(Dataset):
        def __len__(self):
            return 4

        def make_batch(self, indices):
            return indices

    check_indexable(Whole(), "training set")
