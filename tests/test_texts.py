"""Texts of a table are classified: what is read, by which columns, by a bag or a given encoder.

Their numbers in several processes and after a kill: tests/test_worlds.py.
"""

import contextlib
import io
import json
import shutil

from trainkit import predict

import pandas as pd
import pytest
import torch
from conftest import refused, rows

from examples import text
from trainkit.config import parse
from trainkit.texts import bags, encoders, texts
from trainkit.tools.export import write_export

transformers = pytest.importorskip("transformers")

FLAGS = "--batch-size 8 --eval-batch-size 27 --epochs 2 --stop-after-steps 20 --no-pictures"
GIVEN = "--learning-rate 1e-3 --max-tokens 12 --base"


@pytest.fixture(scope="module")
def start(run_main, base):
    def call(run_dir, *args):
        flags = [*FLAGS.split(), "--data", base / "lines.csv", "--run-dir", run_dir, *args]
        return run_main("examples.text", *flags)

    return call


@pytest.fixture(scope="module")
def whole(start, base, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        start(run_dir, *GIVEN.split(), base)
    assert (
        "text 'text', label 'label'" in output.getvalue() and "largest class" in output.getvalue()
    )
    assert "\nrecognised: " in output.getvalue()
    return run_dir


def test_predict_needs_the_run_folder_alone_and_is_calibrated(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "new.txt").write_text("bread salt soup and\n\nball goal team and\n")
    (tmp_path / "new.bin.txt").write_text("bread salt soup and", "utf-16")
    (tmp_path / "new.jsonl").write_text('{"n": 1, "text": "paint song stage and"}')
    predictor = predict.load_run(folder)
    first, second = predictor.predict_file(tmp_path / "new.txt").splitlines()
    assert "new.txt:1: " in first and "new.txt:3: " in second
    assert "food " in first.partition("(")[0] and "sport " in second.partition("(")[0]
    assert "art " in predictor.predict_file(tmp_path / "new.jsonl").partition("(")[0]
    said = predictor.predict_file(tmp_path / "new.bin.txt", encoding="cp1252")
    assert "food " in said.partition("(")[0]
    assert predictor.calibration["temperature"] == 1  # all 27 were right: nothing to learn from
    with refused("--export cannot take a model whose input is a text"):
        write_export(predictor, folder)


def test_a_bag_is_used_with_the_run_folder_alone_and_counts_rare_pieces(start, tmp_path):
    start(tmp_path / "run", "--epochs", 4)
    predictor = predict.load_run(tmp_path / "run")
    assert rows(tmp_path / "run")[-1]["eval_accuracy"] > 0.95
    rarity = predictor.model.rarity
    (word,), (never,) = (bags.make_bags([x], predictor.metadata["num_bits"]) for x in ("and", "Q"))
    assert (
        rarity[word].max() == pytest.approx(1) and rarity[never].max() > 4
    )  # in each text, in none
    (tmp_path / "new.txt").write_text("and SOUP\n" + "\n" * 50 + "teamball\n")
    first, second = predictor.predict_file(tmp_path / "new.txt").splitlines()
    assert "food " in first.partition("(")[0]
    assert "new.txt:52: " in second
    assert "sport " in second.partition("(")[0]


def bag_of(*lines: str) -> list[torch.Tensor]:
    return bags.make_bags(lines, bags.MAX_BITS)


def test_padding_and_other_texts_change_nothing(base):
    config = parse(text.Config, ["--base", str(base)])
    encoder, tokenizer = encoders.read_encoder(config)
    metadata = {"encoder": json.loads(json.dumps(encoder)), "max_tokens": 40, "classes": ["a", "b"]}
    model = text.make_model(metadata, str(base))  # in training mode: dropout would show
    assert config.max_tokens == 40 and model.training
    bag = text.make_model({"encoder": None, "num_bits": bags.MAX_BITS, "classes": ["a", "b"]})
    torch.nn.init.normal_(bag.table.weight)
    lines = ["soup", "ball goal team and song"]
    for each, tokens in ((model, texts.tokenize(lines, 40, tokenizer)), (bag, bag_of(*lines))):
        both = text.collate([(row, 0) for row in tokens])
        alone = text.collate([(tokens[0], 0)])
        expected = each(both.tokens, both.lengths, both.pieces)[0].tolist()
        assert each(alone.tokens, alone.lengths, alone.pieces)[0].tolist() == pytest.approx(
            expected, abs=1e-5
        )


def test_a_bag_has_the_words_the_pairs_of_words_and_the_letters_of_a_text():
    one, same, other = bag_of("Ein TEXT", " ein  text\n", "text ein")
    assert torch.equal(one, same) and len(one) == len({*one.tolist()})
    assert len(other) == len(one)  # and the pair of words is another one
    assert len({*one.tolist()} - {*other.tolist()}) == 1
    # Letters that are written without blanks: 3 of 4 n-grams with both of the first are left.
    thai, part = bag_of("\u0e14\u0e32\u0e1a\u0e44\u0e02\u0e27\u0e49", "\u0e14\u0e32\u0e1a")
    assert len({*thai.tolist()} & {*part.tolist()}) >= 6
    assert torch.equal(*bag_of("\uff21\uff22\uff23 1", "abc 1"))  # full width


def test_nothing_that_a_configuration_names_is_fetched_or_run():
    evil = {"auto_map": {"AutoModel": "evil.Model"}, "attn_implementation": "someone/kernel"}
    assert encoders.plain({"model_type": "bert", **evil, "part": {"n": 1, **evil}}) == {
        "model_type": "bert",
        "part": {"n": 1},
    }


A, B = "the first of two", "one more line here"
GOOD = {"a": [f"{A} {n}" for n in range(20)], "b": [*"xy"] * 10}
CALLED = {"Text": [*"abcdefgh"], "extra": [*"xy"] * 4, "LABEL": [*"uvwxyzuv"]}
REVIEWS = {"id": range(20), "Review": GOOD["a"], "topic": GOOD["b"]}
NAMED = "--text a --label b"
CASES = [
    (GOOD, "", "no column is called text, sentence, .* body: choose one by --text: a, b"),
    (GOOD, "--text a", "no column is called label, .* target: choose one by --label: a, b"),
    (GOOD, "--text a --label c", "there is no column 'c', only a, b"),
    (GOOD, NAMED, "16 4 x,y"),
    (REVIEWS, "", "16 4 x,y: text 'Review', label 'topic'"),
    (CALLED, "--eval-data {path}", "8 8 u,v,w,x,y,z: text 'Text', label 'LABEL'"),
    (GOOD | {"b": [1, 2.0] * 10}, NAMED, "16 4 1,2"),
    (GOOD | {"b": ["x"] * 20}, NAMED, "'b' has 1 different label in 20 rows"),
    (GOOD | {"b": [*range(20)]}, NAMED, "has 20 different labels in 20 rows .* not classes"),
    (GOOD | {"a": ["", " ", *GOOD["a"][2:]]}, NAMED, "15 3 x,y: 2 rows dropped: no text or"),
    (GOOD | {"b": ["", *GOOD["b"][1:]]}, NAMED, "16 3 x,y: 1 row dropped: no text or"),
    (GOOD | {"b": [True, False] * 10}, NAMED, "16 4 False,True"),
    (GOOD | {"a": [A] * 20}, NAMED, "texts are left .* as equal texts are not parted"),
    (GOOD | {"a": [f"\ud800 {each}" for each in GOOD["a"]]}, NAMED, "16 4 x,y"),
]


def read(flags) -> texts.TextSets:
    return texts.read_sets(parse(text.Config, flags.split()))


@pytest.mark.parametrize("columns, flags, said", CASES)
def test_columns_are_found_or_asked_for(tmp_path, columns, flags, said):
    path = tmp_path / "lines.jsonl"
    path.write_text(
        "\n".join(map(json.dumps, pd.DataFrame(columns, dtype=object).to_dict("records")))
    )
    flags = f"--data {path} {flags.format(path=path)}"
    if not said[0].isdigit():
        with refused(said):
            read(flags)
        return
    sets = read(flags)
    found = f"{len(sets.train)} {len(sets.held_out)} {','.join(sets.classes)}"
    assert said.partition(":")[0] == found
    assert said.partition(": ")[2] in " ".join(sets.plan.values())
    assert {label for _, label in sets.held_out} == {*range(len(sets.classes))}


def test_equal_texts_are_on_one_side_of_a_split_and_rare_classes_are_named(tmp_path):
    lines = [(f"{A} {n % 7}", [*"xy"][n % 7 % 2]) for n in range(40)]
    lines += [(f"{B} {n}", "few") for n in range(4)] + [(B, "one"), (B, "same")] * 6
    pd.DataFrame(lines, columns=["text", "label"]).to_csv(tmp_path / "a.csv", index=False)
    sets = read(f"--data {tmp_path / 'a.csv'}")
    sides = [{line for line, _ in side} for side in (sets.train, sets.held_out)]
    assert sides[0].isdisjoint(sides[1])
    assert sets.plan["twice"] == "44 of 56 texts repeat another: on one side"
    assert len(sets.train) + len(sets.held_out) == len(lines) and len(sets.held_out) >= 4
    few = "classes have fewer than 5 texts to evaluate on"
    assert few in sets.plan["rare"]
    assert all(f"{name} 0" in sets.plan["rare"] for name in ("few", "one", "same"))
    again = read(f"--data {tmp_path / 'a.csv'} --eval-data {tmp_path / 'a.csv'}")
    assert again.plan["twice"].startswith(f"{len(lines)} of {len(lines)} texts")


def test_balance_draws_all_classes_equally_often_and_their_mean_recall_is_logged(tmp_path):
    lines = [(f"ball goal {n}", "a") for n in range(190)] + [(f"bread {n}", "b") for n in range(10)]
    pd.DataFrame(lines, columns=["text", "label"]).to_csv(tmp_path / "a.csv", index=False)
    flags = ["--data", str(tmp_path / "a.csv"), "--epochs", "1", "--no-pictures", "--balance"]
    config = parse(text.Config, flags)
    train_set = text.load_data(config)[0]
    weights, order = texts.choose_order(train_set, config)
    labels = torch.tensor([label for _, label in train_set])
    assert [weights[labels == n].sum().item() for n in (0, 1)] == pytest.approx([1, 1])
    assert order is None
    metrics = text.main([*flags, "--run-dir", str(tmp_path / "run")])
    assert 0.5 <= metrics["eval_balanced_accuracy"] <= 1
