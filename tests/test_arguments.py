"""Flags: checked all at once, wherever they come from."""

from pathlib import Path

from trainkit import best
from trainkit import config as arguments

import pytest

import train_mnist
import train_regression
from trainkit.checkpoint import Progress
from trainkit.errors import UsageError


@pytest.mark.parametrize("typed", ["--epoch 3", "--lr 0.1", "--optimizer sgdd", "@{}.gone"])
def test_a_slip_in_a_flag_is_one_sentence(typed: str, tmp_path: Path) -> None:
    for script in (train_mnist, train_regression):
        with pytest.raises(UsageError, match=r"see .* --help\)$") as refused:
            script.parse_args(typed.format(tmp_path).split())
        assert len(str(refused.value).splitlines()) == 1


# What a file of flags holds, and the --run-dir and --label that come of it.
FILES = [
    ("--run-dir 'my runs' # the run's folder\n# and\n--label x", "my runs", "x"),
    ('--run-dir "a # b"\t--label "it\'s"', "a # b", "it's"),
]


@pytest.mark.parametrize(("text", "run_dir", "label"), FILES)
def test_a_file_of_flags_is_read_as_by_a_shell(
    text: str, run_dir: str, label: str | None, tmp_path: Path
) -> None:
    (tmp_path / "flags").write_text(text)
    args = train_mnist.parse_args([f"@{tmp_path / 'flags'}"])
    assert (str(args.run_dir), args.label) == (run_dir, label)


# Flags of train_regression.py, and what is said of them; each with all the others at once.
WRONG = {
    "--num-samples 99999999999": "--num-samples 99999999999 must be at least 1 and below 2",
    "--epochs 0": "--epochs 0 must be at least 1",
    "--learning-rate nan": "--learning-rate nan must be a number above 0",
    "--warmup 1": "--warmup 1.0 must be at least 0 and below 1",
    "--keep 1": "--keep 1 must be at least 2",
    "--seed -1": "--seed -1 must be at least 0 and below 2..32",
    "--ema 1": "--ema 1.0 must be above 0 and below 1",
    "--patience 3": "--patience needs --keep-best",
    "--eval-every 0": "--eval-every 0 must be at least 1",
    "--min-learning-rate -1": "--min-learning-rate -1.0 must be a number of at least 0",
    "--batch-size 7": "--batch-size 7 must be a multiple of 2 processes",
    "--noise inf": "--noise inf must be a number of at least 0",
}


def test_all_wrong_flags_are_named_at_once_also_those_from_code() -> None:
    args = train_regression.parse_args(
        [*" ".join(WRONG).split(), "--data", "x.csv", "--target", "y"]
    )
    args.timeout = 0
    with pytest.raises(UsageError) as refused:
        train_regression.check_arguments(args, 2)
    for words in (*WRONG.values(), "--timeout 0 must be at least 1 and below"):
        assert words.replace("2..32", "2**32") in str(refused.value)
    assert str(refused.value).count("; ") == len(WRONG)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--schedule constant --min-learning-rate 1e-4", "is for --schedule onecycle and cosine"),
        ("--learning-rate 1e-4 --min-learning-rate 1e-4", "must be below the peak of 0.0001"),
        (
            "--learning-rate 0.1 --schedule cosine --scale-lr 1024 --min-learning-rate 0.01",
            "below the peak of 0.003125",
        ),
        ("--learning-rate 2e-4 --min-learning-rate 1e-4 --keep-best eval_loss --patience 1", ""),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: str, words: str) -> None:
    args = train_regression.parse_args(flags.split())
    problems = arguments.find_problems(args, 1)
    assert [words in problem for problem in problems] == [True] * bool(words)


# Metrics of --keep-best, by the direction that is known of them or said.
DIRECTIONS = {
    "min": "eval_wer eval_cer fid mape eval_clean-loss loss/2 Valid.Loss eval_accuracy:min x:min",
    "max": "eval_accuracy map50 ndcg@10 eval_f1_macro eval_R2 eval_margin eval_loss:max a:b:max",
    "": "x neg_loss accuracy_gap reward_loss lossless eval_format eval_loss:MIN :min errata a:b",
}
DIRECTION_OF = [(name, way) for way, names in DIRECTIONS.items() for name in names.split()]


@pytest.mark.parametrize(("metric", "direction"), DIRECTION_OF)
def test_which_value_of_a_metric_is_better_is_known_or_must_be_said(
    metric: str, direction: str
) -> None:
    args = train_regression.parse_args(["--keep-best", metric, "--patience", "9"])
    problems = arguments.find_problems(args, 1)
    assert ["followed by :min or :max" in each for each in problems] == [True] * (not direction)
    if direction:
        name = metric.removesuffix(f":{direction}")
        # An older checkpoint knows the name alone.
        progress = Progress(metrics={name: 1.0}, best=2.0, best_name=name)
        assert best.update_best(args, progress) == (direction == "min")
        progress.metrics[name] = 3.0
        assert best.update_best(args, progress) == (direction == "max")


def test_only_the_experiment_must_be_equal_when_a_run_is_resumed() -> None:
    plain = arguments.experiment(train_regression.parse_args([]))
    same = "--run-dir x --patience 3 --eval-every 2 --accumulate 2 --data x --target-r2 0.5"
    assert arguments.experiment(train_regression.parse_args(same.split())) == plain
    for other in ("--ema 0.9", "--min-learning-rate 1e-5", "--noise 0", "--epochs 7"):
        assert arguments.experiment(train_regression.parse_args(other.split())) != plain
    longer = [train_regression.parse_args(["--schedule", "constant", "--epochs", n]) for n in "12"]
    assert arguments.experiment(longer[0]) == arguments.experiment(longer[1])
    with pytest.raises(AssertionError, match="holds no flag"):
        arguments.experiment(type(longer[0])(**vars(longer[0]) | {"not_the_experiment": ["typo"]}))


def test_gradients_are_not_added_up_beside_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    args = train_mnist.parse_args(["--accumulate", "2"])
    assert not arguments.find_problems(args, 1)
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    (problem,) = arguments.find_problems(args, 1)
    assert "use --accumulate 1, or dynamo_mode: default" in problem
