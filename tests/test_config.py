"""Flags: read as a shell would, checked all at once, wherever they come from."""

import importlib
import os
import re
from pathlib import Path

from trainkit import Run

import pytest
from conftest import ROOT, refused

import train_mnist
import train_regression
from trainkit.config import TrainingConfig, parse
from trainkit.numbers.orders import Progress
from trainkit.run.ending import update_best
from trainkit.store import places as stores
from trainkit.tables.sets import TableConfig

# What is typed, and a part of the sentence that answers it.
SLIPS = {
    "--epoch 3": "Unrecognized options: --epoch, 3; perhaps you meant --cosine-epochs or --epochs",
    "--optimizer sgdd": "--optimizer'. Expected one of .'adamw', 'adam', 'sgd', 'muon'. (see ",
    "--save-every None": "--save-every: .*'None'.*(see ",
    "--keep 2 --seed": "Missing value for argument '--seed'.*(see ",
    "--keep_best eval_loss --batch_size=1e2 --seed 1": "--batch-size: .*'1e2'",
    "--drop-last true --epochs 2": "Unrecognized options: true (see ",
    "@{}/gone": "gone cannot be read: ",
    "@{}/open": "open cannot be read: ValueError: No closing quotation",
}


@pytest.mark.parametrize("typed", SLIPS)
def test_a_slip_in_a_flag_is_one_sentence(typed, tmp_path, monkeypatch):
    (tmp_path / "open").write_text("--label 'x")
    monkeypatch.setenv("COLUMNS", "40")  # the library breaks its lines there
    for script in (train_mnist, train_regression):
        with refused(SLIPS[typed].replace("(", r"\(")):
            parse(script.Config, typed.format(tmp_path).split())


# What a file of flags holds, and the --run-dir and --label that come of it.
FILES = [
    ("--run-dir 'my runs' # the run's folder\n# and\n--label x", "my runs", "x"),
    ("--run-dir exp#1 --label \\\n'#'#a#b # it's\n#", "exp#1", "##a#b"),
]


@pytest.mark.parametrize("text, run_dir, label", FILES)
def test_a_file_of_flags_is_read_as_by_a_shell(text, run_dir, label, tmp_path):
    (tmp_path / "flags").write_text(text)
    (tmp_path / "more").write_text(f"--keep 7 @{tmp_path / 'flags'}")
    config = parse(train_mnist.Config, [f"@{tmp_path / 'more'}", "--keep", "3"])
    assert (str(config.run_dir), config.label, config.keep) == (run_dir, label, 3)


# Flags of train_regression.py, and what is said of them; each with all the others at once.
WRONG = {
    "--num-samples 99999999999": "--num-samples 99999999999 must be at least 1 and below 2",
    "--epochs 0": "--epochs 0 must be at least 1",
    "--learning-rate nan": "--learning-rate nan must be a number above 0",
    "--warmup 1": "--warmup 1.0 must be at least 0 and below 1",
    "--keep 1": "--keep 1 must be at least 2",
    "--ema 1": "--ema 1.0 must be above 0 and below 1",
    "--patience 3": "--patience 3 does nothing without --keep-best: leave it out",
    "--mirror-must": "--mirror-must does nothing without --mirror",
    "--min-learning-rate -1": "--min-learning-rate -1.0 must be a number of at least 0",
    "--batch-size 7": "--batch-size 7 must be a multiple of 2 processes",
    "--hidden 3,0": "--hidden [3, 0] must be at least 1 each",
    "--noise -1": "--noise -1.0 must be a number of at least 0",
}


def test_all_wrong_flags_are_named_at_once_also_those_from_code():
    config = parse(train_regression.Config, [*" ".join(WRONG).split(), "--model", "mlp"])
    config.timeout, config.schedule = 0, "cosin"
    with refused("") as raised:
        config.validate(2)
    for words in (*WRONG.values(), "--timeout 0 must be", "--schedule cosin must be one of onec"):
        assert words in str(raised.value)
    assert str(raised.value).count("; ") == len(WRONG) + 1


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--schedule constant --min-learning-rate 1e-4", "onecycle, cosine or linear, or --decay"),
        ("--learning-rate 1e-4 --min-learning-rate 1e-4", "must be below the peak of 0.0001"),
        (
            "--learning-rate 0.1 --schedule cosine --scale-lr 1024 --min-learning-rate 0.01",
            "below the peak of 0.003125",
        ),
        ("--schedule cosine --decay 0.2", "constant or exponential: cosine falls by itself"),
        ("--schedule constant --decay 0.6 --warmup 0.6", "are more than the whole run"),
        ("--schedule constant --decay 0.2 --warmup 0.8 --min-learning-rate 1e-4", ""),
        ("--schedule linear --min-learning-rate 1e-4", ""),
        ("--accumulate 2", "use --accumulate 1, or dynamo_mode: default"),
        ("--learning-rate 2e-4 --min-learning-rate 1e-4 --keep-best eval_loss --patience 1", ""),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, words, monkeypatch):
    for mode in ("reduce-overhead", "max-autotune"):  # both use CUDA graphs
        monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", mode)
        problems = parse(train_regression.Config, flags.split()).find_problems(1)
        assert [words in problem for problem in problems] == [True] * bool(words)


# What is typed after a script, and what is said of the flags that do nothing beside the others.
UNREAD = {
    "train_regression --hidden 8,9": [
        "--hidden 8,9 does nothing without --model mlp: leave it out"
    ],
    "train_mnist --cosine-epochs 2 --max-shift 0 --no-augment": [
        "--cosine-epochs 2 does nothing without --schedule cosine or exponential+cosine: leave it "
        "out",
        "--max-shift 0 does nothing without --augment: leave it out",
    ],
    "examples.table --data x --eval-data y --test-fraction 0.5": [
        "--test-fraction 0.5 does nothing beside --eval-data: leave it out"
    ],
    "examples.finetune --merge": ["--merge does nothing without --lora: leave it out"],
    # At its default, or read, also by what a script chooses itself.
    "train_regression --momentum 0.9 --hidden 64,64": [],
    "train_regression --optimizer sgd --momentum 7 --model mlp --hidden 8 --noise 0": [],
    "train_regression --schedule exponential+cosine --gamma 0.5 --cosine-epochs 2": [],
    "examples.text --momentum 0.5": [],
    "train_mnist @examples/recipes/best": [],
    "train_mnist @examples/recipes/fast": [],
    "examples.finetune @examples/recipes/smollm --load-4bit": [],
}


@pytest.mark.parametrize("typed", UNREAD)
def test_a_flag_that_does_nothing_beside_the_others_is_refused_before_the_data(typed, monkeypatch):
    monkeypatch.chdir(ROOT)
    script, *words = typed.split()
    config = parse(importlib.import_module(script).Config, words)
    assert config.find_unread() == UNREAD[typed]
    if UNREAD[typed]:
        with refused(re.escape(UNREAD[typed][0])):
            config.validate(1)
    config.max_shift = 3.0  # as load_data sets it
    assert not any(words in UNREAD[typed] for words in config.find_problems(1))


def late(words):
    """Start the linear script with flags whose files are not there, and data that must not load."""
    config = parse(train_regression.Config, words)
    with Run(config, "late"):
        raise AssertionError("the data would be loaded now")


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--start-from gone", "--start-from gone cannot be read .docs/resume.md makes a safe"),
        ("--start-from pipe", "--start-from pipe cannot be read: it is not a file"),
        ("--start-from text", "--start-from text cannot be read .*header too large"),
        ("--resume gone", "--resume gone is not in run.checkpoints, and a run continues only"),
        ("--mirror nosuch://b/x", "--mirror nosuch://b/x cannot be used: .*Protocol not known"),
    ],
)
def test_files_and_places_that_are_not_there_are_refused_before_the_data_are_loaded(
    words, sentence, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stores, "WAITS", ())
    os.mkfifo("pipe")
    Path("text").write_text("these are no weights")
    with refused(sentence):
        late([*words.split(), "--run-dir", "run"])
    assert not Path("run").exists()


# Metrics of --keep-best, by the direction that is known of them or said.
DIRECTIONS = {
    "min": "eval_wer eval_clean-loss loss/2 Valid.Loss eval_accuracy:min x:min",
    "max": "eval_accuracy map50 ndcg@10 eval_R2 eval_loss:max a:b:max",
    "": "x neg_loss reward_loss lossless eval_loss:MIN :min a:b",
}
DIRECTION_OF = [(name, way) for way, names in DIRECTIONS.items() for name in names.split()]


@pytest.mark.parametrize("metric, direction", DIRECTION_OF)
def test_which_value_of_a_metric_is_better_is_known_or_must_be_said(metric, direction):
    config = TrainingConfig(keep_best=metric, patience=9)
    problems = config.find_problems(1)
    assert ["followed by :min or :max" in each for each in problems] == [True] * (not direction)
    if direction:
        name = metric.removesuffix(f":{direction}")
        progress = Progress(metrics={name: 1.0}, best=2.0, best_name=f"{name}:{direction}")
        assert update_best(config, progress) == (direction == "min")
        progress.metrics[name] = 3.0
        assert update_best(config, progress) == (direction == "max")


def test_only_the_experiment_must_be_equal_when_a_run_is_resumed():
    same = "--run-dir x --patience 3 --eval-every 2 --accumulate 2 --eval-batch-size 9"
    others = ("--ema 0.9", "--min-learning-rate 1e-5", "--noise 0", "--epochs 7")
    longer = ("--schedule constant --epochs 1", "--schedule constant --epochs 2")
    assert TrainingConfig(decay=0.5, epochs=1).experiment()["epochs"] == 1  # its rates need it
    configs = [parse(train_regression.Config, x.split()) for x in ("", same, *others, *longer)]
    plain, again, *changed, shorter, long = (config.experiment() for config in configs)
    assert plain == again and plain not in changed and shorter == long != plain
    # run.begin's metadata may be called like a shared flag, such as "pictures".
    assert configs[0].nodes_may_differ == set()


def test_a_target_is_a_metric_and_a_value_except_where_the_script_has_its_own():
    for text, expected in (
        ("eval_accuracy:0.99", ("eval_accuracy", "max", 0.99)),
        ("eval_gap:min:-1e-3", ("eval_gap", "min", -1e-3)),
    ):
        config = parse(TrainingConfig, ["--target", text])
        config.validate(1)
        assert config.metric_target == expected and "target" in config.resume_may_change
    for wrong in ("eval_gap:0.5", "eval_accuracy", "eval_accuracy:high", ":0.5"):
        with refused(f"--target {wrong} must be METRIC:VALUE"):
            parse(TrainingConfig, ["--target", wrong]).validate(1)
    config = parse(TableConfig, ["--data", "x", "--target", "price"])
    assert config.metric_target is None and "target" not in config.resume_may_change


@pytest.mark.parametrize("words", [["--mirror", ""], ["--mirror="], ["--run-dir", ""]])
def test_an_empty_value_as_of_a_variable_that_is_not_set_is_refused(words):
    with refused(f"{words[0].rstrip('=')} is empty: give it a value, or leave it out"):
        parse(TrainingConfig, words)
