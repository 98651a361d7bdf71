"""Means over the tokens of a step, losses that couple samples, and what else a GPT takes as given.

Every number is compared with a loop of plain PyTorch that is written out here. Nothing divides the
sizes: the last batch of an epoch is short, and of three processes some then have no sample.
"""

import itertools
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same_bytes, rows, saved
from plain import logged_losses, plain_losses, quick
from torch.utils.data import default_collate

from examples import gpt, two_towers
from trainkit.config import parse
from trainkit.numbers.loaders import EpochBatches

WORLDS, NUM_STEPS, BATCH = (1, 2, 3), 14, 24
TINY = f"--layers 1 --width 32 --epochs 3 --batch-size {BATCH} --eval-batch-size 7 --log-every 1"
TINY += " --no-pictures --timeout 60 --learning-rate 1e-3 --min-learning-rate 0 --schedule constant"
TINY += " --warmup 0 --weight-decay 0.1"
MODES = {
    "text": f"{TINY} --num-bytes 16000".split(),  # 112 samples: 24, 24, 24, 24, 16
    "answers": f"{TINY} --num-bytes 1030000 --answers-only".split(),
}
GRID = [*itertools.product(MODES, WORLDS, (1, 4))]  # mode, world, accumulate


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where the text lies, and all runs."""
    return tmp_path_factory.mktemp("gpt")


def plain(mode):
    """The GPT in plain PyTorch: its losses, and its weights."""
    args = parse(gpt.Config, MODES[mode])
    samples, *_ = gpt.load_data(args)
    torch.manual_seed(0)
    model = gpt.GPT(args)

    def loss_of(indices):
        tokens, first, end = default_collate([samples[index] for index in indices.tolist()])
        tokens, place = tokens.long(), torch.arange(1, tokens.shape[1])
        counts = (place >= first[:, None]) & (place < end[:, None])
        assert counts.all() == (mode == "text")
        return F.cross_entropy(model(tokens[:, :-1])[counts], tokens[:, 1:][counts])

    vectors, matrices = ([p for p in model.parameters() if (p.ndim > 1) == m] for m in (0, 1))
    groups = {"params": matrices}, {"params": vectors, "weight_decay": 0.0}
    adam = torch.optim.AdamW(groups, 1e-3, weight_decay=0.1)

    def clip(*_):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    adam.register_step_pre_hook(clip)
    assert len(samples) % BATCH
    batches = EpochBatches(len(samples), BATCH, seed=0)
    return plain_losses(batches, adam, range(args.epochs), loss_of), model.state_dict()


@pytest.mark.parametrize("mode, world, accumulate", quick(GRID, [("answers", 2, 4)]))
def test_a_step_has_the_mean_of_all_its_tokens_wherever_they_are(
    fork_main, folder, mode, world, accumulate
):
    run_dir = folder / f"{mode}-{world}-{accumulate}"
    more = ["--accumulate", accumulate, "--run-dir", run_dir]
    fork_main("examples.gpt", *MODES[mode], *more, world=world).finished()
    losses, weights = plain(mode)
    assert logged_losses(run_dir) == pytest.approx(losses, abs=2e-6)
    tensors, _ = saved(run_dir)  # with both names of the tied weights
    torch.testing.assert_close(tensors, dict(weights), atol=3e-5, rtol=0)
    model = gpt.GPT(SimpleNamespace(layers=1, width=32, dropout=0.0, checkpointing=False))
    model.load_state_dict(tensors, strict=True)
    assert model.lm_head.weight is model.embedding.weight


ENDING = ["--dropout", "0.1", "--ema", "0.9", "--eval-every", "3", "--save-every", "4"]
ENDING += ["--keep-best", "eval_samples:max", "--patience", "2"]


@pytest.mark.parametrize("mode, world, accumulate", quick(GRID, [("answers", 2, 1)]))
def test_a_kill_changes_no_byte_of_a_run_that_ends_by_patience(
    nursery, fork_main, folder, mode, world, accumulate
):
    flags = [*MODES[mode], *ENDING, "--accumulate", accumulate, "--run-dir"]
    whole = folder / f"whole-{mode}-{world}-{accumulate}"
    fork_main("examples.gpt", *flags, whole, world=world).finished()
    last, evaluations = rows(whole)[-1]["step"], rows(whole, "epochs")
    assert last in (6, 9) and len(evaluations) == 3  # the second and third are not better
    files = [path.name for name in ("raw.*", "best.*", "sample-*.txt") for path in whole.glob(name)]
    assert len(files) == 2 + len(evaluations)
    for killed_at in (last - 2, "end") if world == 1 else ("end",):
        run_dir = folder / f"killed-{mode}-{world}-{accumulate}-{killed_at}"
        fault = {"signal": [killed_at, signal.SIGKILL]}
        if killed_at == "end":  # in the save of the run's end
            num_saves = len((Path(f"{whole}.saved")).read_text().split())
            fault = {"save": num_saves, "event": 3, "how": "kill"}
        killed = nursery.run("examples.gpt", *flags, run_dir, world=world, fault=fault)
        assert 0 not in killed.codes and not (run_dir / "DONE").exists(), killed.output
        fork_main("examples.gpt", *flags, run_dir, "--resume", "auto", world=world).finished()
        assert_same_bytes(run_dir, whole, *files)


def test_a_loss_that_couples_samples_sees_those_of_all_processes(fork_main, tiny_mnist, tmp_path):
    # 331 samples: 11 batches of 30, and one sample for the last; 101 to evaluate on.
    flags = "--batch-size 30 --epochs 2 --log-every 1 --schedule constant --warmup 0 --no-pictures"
    flags += f" --eval-batch-size 25 --timeout 60 --stop-after-steps {NUM_STEPS}"
    where = ["--dataset", str(tiny_mnist), "--run-dir", str(tmp_path)]
    fork_main("examples.two_towers", *flags.split(), *where, world=3).finished()
    samples, *_ = two_towers.load_data(parse(two_towers.Config, where))
    torch.manual_seed(0)
    model = two_towers.Towers()

    def contrast(indices):
        rows = model(samples.tensors[0][indices])
        scores, right = rows[:, 0] @ rows[:, 1].T, torch.arange(len(rows))
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2

    adam = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    losses = plain_losses(EpochBatches(len(samples), 30, seed=0), adam, range(2), contrast)
    found = logged_losses(tmp_path)
    assert found == pytest.approx(losses[:NUM_STEPS], rel=1e-6)
    evaluations = rows(tmp_path, "epochs")
    assert [row["eval_samples"] for row in evaluations] == [101, 101]
    assert 0.02 < evaluations[-1]["eval_accuracy"] < 1
