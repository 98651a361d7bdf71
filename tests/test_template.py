"""The template promise: three functions of train_mnist.py replaced, everything else works."""

import shutil
from pathlib import Path

import pytest
from conftest import ROOT, assert_num_processes, kill_all, rows, run, start

DATA = '''def make_dataloaders(args) -> tuple[DataLoader, DataLoader, list[str]]:
    """Colour pictures, 3 x 20 x 20: a bright square in one of four corners, of any colour."""
    names = ["top left", "top right", "bottom left", "bottom right"]
    sets = []
    for size, seed in ((600, 1), (151, 2)):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(4, (size,), generator=generator)
        images = torch.randint(90, (size, 3, 20, 20), generator=generator, dtype=torch.uint8)
        colours = torch.randint(120, 255, (size, 3), generator=generator, dtype=torch.uint8)
        for image, label, colour in zip(images, labels.tolist(), colours, strict=True):
            top, left = 11 * (label // 2) + 1, 11 * (label % 2) + 1
            image[:, top : top + 7, left : left + 7] = colour[:, None, None]
        sets.append(Images(images, labels))
    train_set, eval_set = sets
    train_batches = EpochBatches(len(train_set), args.batch_size, seed=args.seed,
                                 drop_last=args.drop_last, accumulate=args.accumulate)
    eval_batches = EpochBatches(len(eval_set), args.eval_batch_size)
    return (
        make_loader(train_set, train_batches, args.num_workers),
        make_loader(eval_set, eval_batches, args.num_workers),
        names,
    )
'''
MODEL = '''class Compact(nn.Module):
    """Another network, one that takes three channels."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.AdaptiveAvgPool2d(4))
        self.head = nn.Linear(128, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).flatten(1))
'''
LOSS_BEFORE = """                loss_sum = F.cross_entropy(
                    logits, labels, reduction="sum", label_smoothing=args.label_smoothing
                )
"""
LOSS = """                loss_sum = F.multi_margin_loss(logits, labels, reduction="sum")
"""
FLAGS = ("--epochs", 4, "--batch-size", 20, "--eval-batch-size", 50, "--max-shift", 1,
         "--max-turn", 5, "--log-every", 3, "--save-every", 7, "--pictures")  # fmt: skip


def replaced(text: str, begin: str, new: str) -> str:
    """The text with the definition that begins with `begin`, to the next one, replaced."""
    first = text.index(begin)
    last = text.index("\n\n\n", first) + 1
    return text[:first] + new + text[last:]


@pytest.fixture(scope="module")
def my_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of train_mnist.py beside trainkit/, with data, model and loss of its own."""
    folder = tmp_path_factory.mktemp("template")
    shutil.copytree(ROOT / "trainkit", folder / "trainkit")
    text = (ROOT / "train_mnist.py").read_text()
    text = replaced(text, "def make_dataloaders(", DATA)
    text = replaced(text, "class Compact(", MODEL)
    assert text.count(LOSS_BEFORE) == 1
    path = folder / "train_squares.py"
    path.write_text(text.replace(LOSS_BEFORE, LOSS))
    return path


@pytest.mark.slow
def test_three_replaced_functions_run_on_two_processes_with_a_kill_and_a_resume(
    my_script: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    killed = start(str(my_script), "--run-dir", run_dir, *FLAGS, config="2cpu")
    while not any((run_dir / "checkpoints").glob("step-*")):
        assert killed.poll() is None, killed.communicate()
    kill_all(killed)
    killed.communicate()
    newest = max((run_dir / "checkpoints").glob("step-*")).name
    assert newest < "step-0000000120" and int(newest[5:]) % 30  # in the middle of an epoch
    again = run(str(my_script), "--run-dir", run_dir, *FLAGS, "--resume", "latest", config="2cpu")
    assert again.returncode == 0, again.stderr
    assert_num_processes(again.stdout, 2)
    assert "resuming from" in again.stdout
    whole = run(str(my_script), "--run-dir", tmp_path / "whole", *FLAGS, config="2cpu")
    assert whole.returncode == 0, whole.stderr
    for name in ("metrics.jsonl", "model.safetensors"):  # as if it had not been killed
        assert (run_dir / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert [row["step"] for row in rows(run_dir, "steps")] == list(range(3, 121, 3))
    last = rows(run_dir, "epochs")[-1]
    assert last["eval_samples"] == 151
    assert 0.9 < last["eval_accuracy"] <= 1
    assert (run_dir / "confusion.png").stat().st_size > 5000
    assert (run_dir / "mistakes.png").exists()
