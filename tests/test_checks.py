"""What a run says of a data set or a function that would give misleading numbers, and what not."""

import re

import pytest
import torch
from loops import changed
from torch import nn
from torch.utils.data import Dataset

from trainkit.errors import UsageError, explain
from trainkit.launch.nodes import check_same
from trainkit.numbers.loaders import EpochBatches
from trainkit.run.data import check_indexable


def test_a_model_put_into_training_mode_in_an_evaluation_is_refused(tmp_path):
    edit = r'lambda batch: {"loss": ', "lambda batch: {'other': one.train()(batch['x']), 'loss': "
    with pytest.raises(
        RuntimeError, match=r"the function of run.evaluate.* called model.train\(\), so dropout"
    ):
        changed(edit)("--run-dir", tmp_path)


class Pooled(nn.Linear):
    """A model of sequences that differ in length."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.stack([row.sum(0) for row in rows.unbind()]))


def test_batch_norm_of_a_single_sample_is_a_sentence():
    with pytest.raises(ValueError) as raised:
        nn.BatchNorm1d(2)(torch.ones(1, 2))
    assert "use --drop-last or another --batch-size" in str(explain(raised.value))


def test_a_batch_may_hold_nested_tensors(tmp_path):
    def collate(samples: list) -> dict[str, torch.Tensor]:
        rows = [sample["x"].expand(1 + sample["index"] % 3, 2) for sample in samples]
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
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


def test_what_differs_is_said_with_its_places(accelerator, monkeypatch):
    everybody = [(node, {"x": value}) for node, value in zip("aabb", "1112", strict=True)]
    monkeypatch.setattr("trainkit.launch.nodes.gather_object", lambda _: everybody)
    with pytest.raises(UsageError, match="x is 1 on process 0 of a, and 2 on process 3 of b: sta"):
        check_same(accelerator, {"x": 1})


UNUSED = """
import torch
import torch.distributed as dist
from trainkit.errors import advise
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
model.forward = model[0].forward
parallel = torch.nn.parallel.DistributedDataParallel(model)
try:
    for _ in range(2):
        parallel(torch.ones(1, 2)).sum().backward()
except RuntimeError as error:
    assert "requires_grad_(False)" in advise(error)
else:
    raise AssertionError("nothing was raised")
"""


def test_weights_that_several_processes_wait_for_are_a_sentence(in_fresh_process):
    in_fresh_process(UNUSED)


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
