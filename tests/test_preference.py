"""Which of two answers is preferred is learned by DPO's loss, the same in every world."""

import itertools
import json
import math
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import refused, rows
from double import SAME
from plain import logged_losses, quick
from sharded import SHARDED
from tuned import (
    FOUR_BITS,
    LORA,
    losses_by_length,
    make_flags,
    open_end,
    open_model,
    start_run,
)

from examples import preference
from trainkit.config import parse
from trainkit.language import preferences, pretrained
from trainkit.language.conversations import ChatSets

transformers = pytest.importorskip("transformers")

# 45 pairs: 5 steps of 8 and one of 5, which leaves a process with fewer pairs.
FLAGS = "--batch-size 8 --eval-batch-size 8 --epochs 1 --log-every 1 --learning-rate 3e-3"
FLAGS += " --schedule constant --warmup 0 --clip-norm inf --eval-every 6 --no-pictures"
# LoRA, a number of processes without sharding or two that shard in this way, --accumulate.
WAYS = itertools.product(([], LORA), (1, 2, SHARDED), (1, 2))


@pytest.fixture(scope="module")
def flags(tuned_base):
    return make_flags(tuned_base, FLAGS, "preferred", 50)


@pytest.fixture(scope="module")
def start(nursery, flags):
    return partial(start_run, nursery, flags, script="examples/preference.py")


def log_probability(model, tokens, learned) -> torch.Tensor:
    """By hand: the model is asked for one conversation, and each token is looked up."""
    found = model(tokens[None]).logits[0].log_softmax(1)
    places = learned.nonzero().flatten().tolist()
    return torch.stack([found[place - 1, tokens[place]] for place in places]).sum()


def plain(flags, lora):
    """Losses and margins of a plain loop, pair by pair, with a second model as the reference."""
    args = parse(preference.Config, [*flags, *lora])
    train_set, *_ = preference.load_data(args)
    frozen = preference.make_model(args)
    torch.manual_seed(0)
    model = preference.make_model(args)
    model = pretrained.add_adapter(model, args.lora) if lora else model
    margins = []

    def loss_of(indices):
        losses = []
        for index in indices:
            chosen, rejected, _ = train_set[index]
            ahead = log_probability(model, *chosen) - log_probability(model, *rejected)
            with torch.no_grad():
                ahead -= log_probability(frozen, *chosen) - log_probability(frozen, *rejected)
            margins.append(0.1 * ahead.item())
            losses.append((1 + (-0.1 * ahead).exp()).log())
        return torch.stack(losses).mean()

    lengths = [pair.length for pair in train_set]
    return losses_by_length(args, model, lengths, loss_of), margins


@pytest.mark.parametrize("lora, way, accumulate", quick(WAYS, [([], SHARDED, 2)]))
def test_losses_are_those_by_hand_and_from_pretrained_opens_the_end(
    start, in_double, tmp_path, lora, way, accumulate
):
    more = ["--accumulate", accumulate]
    output = start(tmp_path, lora, way, *in_double[-2:], *more, double=True).output
    assert len(re.findall("^answer to .*: .", output, re.M)) == 2
    losses = logged_losses(tmp_path)
    expected, margins = plain(in_double, lora)
    assert losses == pytest.approx(expected, abs=SAME)
    assert losses[0] == pytest.approx(math.log(2), abs=SAME) and len(losses) == 6
    last = rows(tmp_path, "epochs")[-1]
    assert last["train_margin"] == pytest.approx(sum(margins) / len(margins), abs=SAME)
    assert last["train_accuracy"] == pytest.approx(sum(m > 0 for m in margins) / len(margins))
    gap = last["eval_chosen_reward"] - last["eval_rejected_reward"]
    assert gap == pytest.approx(last["eval_margin"], abs=1e-4) and "eval_accuracy" in last
    assert last["eval_chosen_logp"] < 0 and last["eval_rejected_logp"] < 0
    open_end(tmp_path / "pretrained", in_double[-1], lora)


def test_numbers_of_the_base_are_computed_once_and_another_base_is_refused(
    run_main, flags, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    flags = [*flags, "--run-dir", f"{tmp_path}/run"]
    run_main("examples.preference", *flags, "--stop-after-steps", 2)
    assert f"\nnext: python -m trainkit.language.ask {tmp_path}/run\n" in capfd.readouterr().out
    (kept,) = (tmp_path / "cache/references").iterdir()
    before = kept.stat().st_mtime_ns
    run_main("examples.preference", *flags, "--stop-after-steps", 3, "--resume", "latest")
    whole = [*flags[:-1], f"{tmp_path}/whole"]
    run_main("examples.preference", *whole, "--stop-after-steps", 3)
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("run", "whole")]
    assert weights[0] == weights[1]
    assert [kept] == list(kept.parent.iterdir()) and kept.stat().st_mtime_ns == before
    model = open_model(flags[flags.index("--base") + 1])
    model.lm_head.weight.data.mul_(2)
    for each in (model, preference.load_data(parse(preference.Config, flags)).tokenizer):
        each.save_pretrained(tmp_path / "other")
    more = ["--resume", "latest", "--base", tmp_path / "other"]
    with refused(r"belongs to another run: (metadata\[reference]|data is)"):
        run_main("examples.preference", *flags, *more)
    assert len([*kept.parent.iterdir()]) == 2


def test_pairs_are_compared_to_the_base_as_its_numbers_of_4_bits(run_main, flags, tmp_path):
    pytest.importorskip("bitsandbytes")
    more = ["--stop-after-steps", 1, "--run-dir", tmp_path]
    run_main("examples.preference", *flags, *FOUR_BITS, *more)
    assert logged_losses(tmp_path) == pytest.approx([math.log(2)], abs=1e-6)


def test_a_reference_without_weights_and_labels_that_are_wrong_by_half_are_refused():
    plugin = SimpleNamespace(cpu_ram_efficient_loading=True)
    state = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    with refused(r"fsdp_cpu_ram_efficient_loading: true .* to false"):
        preferences.add_reference(state, torch.nn.Linear(1, 1), [], list, list)
    with refused(r"--label-smoothing 0.5 .* below 0.5"):
        parse(preference.Config, ["--label-smoothing", "0.5"]).validate(1)


ASK, GOOD = {"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}
HUMAN, GPT = {"from": "human", "value": "2?"}, {"from": "gpt", "value": "4"}
BAD = GOOD | {"content": "5"}
SYSTEM = {"role": "system", "content": "be"}
EARLIER = [ASK | {"content": "1?"}, GOOD | {"content": "2"}]
TEXTS = {"prompt": "2?", "chosen": "4", "rejected": "5"}
LISTS = {"chosen": [GOOD], "rejected": [BAD]}
WHOLE = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
SHARED = {"conversations": [HUMAN], "chosen": GPT, "rejected": GPT | {"value": "5"}}
LONG = "x = 1 ; " * 90


@pytest.fixture
def make(flags, tmp_path):
    def call(*rows: dict) -> ChatSets:
        (tmp_path / "given.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        data = ["--data", str(tmp_path / "given.jsonl"), "--max-tokens", "64"]
        return preferences.load_pairs(parse(preference.Config, [*flags, *data]))

    return call


@pytest.mark.parametrize(
    "row",
    [
        TEXTS,
        LISTS | {"question": "2?"},
        LISTS | {"prompt": [ASK]},
        WHOLE,
        WHOLE | {"prompt": "2?"},
        SHARED,
        {"instruction": "2", "input": "?", "chosen": "4", "rejected": "5"},
        {side: [*EARLIER, *turns] for side, turns in WHOLE.items()} | {"prompt": "2?"},
        {side: [SYSTEM, *turns] for side, turns in WHOLE.items()} | {"prompt": [ASK]},
        TEXTS | {"system": "be", "score": 0},
    ],
    ids=str,
)
def test_each_way_to_write_a_pair_is_the_same_pair(make, row):
    pairs = make(row, row)
    ask = r"2\n\n?" if "input" in row else "2?"
    assert pairs.plan["chosen"].endswith(f"<user>{ask}<end><assistant>[[4<end>]]")
    assert pairs.plan["rejected"].endswith(f"<user>{ask}<end><assistant>[[5<end>]]")
    assert ("be" in str(row)) == pairs.plan["chosen"].startswith("<system>be<end>")
    assert pairs.plan.get("not read") == ("score" if "score" in row else None)


def test_texts_without_a_prompt_are_split_where_they_begin_to_differ_and_that_is_said(make):
    asked = "Human: say\n\nAssistant: "
    row = {"chosen": asked + "ok I", "rejected": asked + "no"}
    pairs = make(row, row)
    assert pairs.plan["data"].startswith("2 rows of chosen and rejected, split where they begin to")
    shown = r"Human: say\n\nAssistant:[[ "
    assert pairs.plan["chosen"] == f"{shown}ok I<end>]]"
    assert pairs.plan["rejected"] == f"{shown}no<end>]]"
    assert [preferences.split_at(*pair) for pair in (("a", "ab"), ("", "a"), ("b", "a"))] == [0] * 3


def test_what_is_cut_or_dropped_is_counted(make):
    lost, same = TEXTS | {"prompt": LONG}, TEXTS | {"chosen": f"{LONG}4", "rejected": f"{LONG}5"}
    pairs = make(TEXTS, TEXTS, lost, same, TEXTS | {"rejected": "4"})
    assert pairs.plan["truncated"] == "2 of 5 pairs, to --max-tokens 64"
    assert pairs.plan["dropped"] == "3 of 5 pairs, which do not have two different answers"
    assert len(pairs.train_set) == len(pairs.eval_set) == 1


@pytest.mark.parametrize(
    "row, said",
    [
        (TEXTS | {"prompt": LONG}, "none of the pairs to train on has two different answers"),
        (TEXTS | {"rejected": "4"}, "none of the pairs to train on has two different answers"),
        ({"prompt": "2?", "chosen": "4"}, "line 1 of .* has no chosen and rejected"),
        (LISTS, "line 1 of .* it has no prompt: give it in a column prompt, or as turns of both"),
        (["4", "5"], "line 1 of .* has no chosen and rejected"),
        (TEXTS | {"tools": [{"name": "f"}]}, "line 1 of .* leaves out or changes 'f'"),
        (WHOLE | {"rejected": [BAD | {"role": "user"}, BAD]}, "line 1 of .* different prompts"),
        (WHOLE | {"chosen": [SYSTEM, ASK, GOOD]}, "line 1 of .* different prompts"),
        (WHOLE | {"prompt": "a"}, "line 1 of .* different prompts"),
    ],
)
def test_what_cannot_be_learned_is_refused(make, row, said):
    with refused(said):
        make(row, row, row)


def test_a_weight_of_chosen_answers_adds_their_loss_per_token(flags):
    tokens = torch.arange(20).view(1, 2, 10)
    learned = tokens % 10 > 3
    places = learned[..., 1:].flatten().nonzero()[:, 0]
    batch = preference.PairBatch(tokens, learned, places, torch.zeros(1, 2))
    config = parse(preference.Config, [*flags, "--sft-weight", "0.5"])
    model = preference.make_model(config).eval()
    values = preference.compute_values(model, batch, config)
    config.sft_weight = 0.0
    plain = preference.compute_values(model, batch, config)["loss"]
    torch.testing.assert_close(values["loss"], plain - 0.5 * values["chosen_logp"] / 6)
