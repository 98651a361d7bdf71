"""What a run says of a data set or a function that would give misleading numbers, and what not."""

import re

import pytest
import torch
from loops import changed
from torch import nn

from trainkit.numbers.loaders import EpochBatches


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
