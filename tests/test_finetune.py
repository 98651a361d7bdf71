"""A Hugging Face model is fine-tuned, whole or by LoRA, as transformers itself would do it."""

import itertools
import json
import re
import shlex
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same_bytes, refused, rows
from double import SAME
from plain import logged_losses, quick
from safetensors.torch import load_file
from sharded import SHARDED
from tuned import (
    FLAGS,
    FOUR_BITS,
    LORA,
    losses_by_length,
    make_flags,
    open_end,
    open_model,
    open_tokenizer,
    start_run,
)

from examples import finetune
from trainkit.checkpoints.sharded import hash_frozen
from trainkit.config import parse
from trainkit.language import answer, ask, pretrained

transformers, peft = map(pytest.importorskip, ("transformers", "peft"))

PACKED = ["--pack", "--max-tokens", "64", "--epochs", "4"]  # 7 steps an epoch
# LoRA, a number of processes without sharding or two that shard in this way, --accumulate, pack.
WAYS = itertools.product(([], LORA), (1, 2, 3, SHARDED), (1, 4), ([], PACKED))


@pytest.fixture(scope="module")
def flags(tuned_base):
    return make_flags(tuned_base, FLAGS, "pairs", 300)


@pytest.fixture(scope="module")
def start(nursery, flags):
    return partial(start_run, nursery, flags, script="examples/finetune.py")


def make_model(flags, lora, *more):
    args = parse(finetune.Config, [*flags, *lora, *more])
    torch.manual_seed(0)
    return args, finetune.make_model(args)


def plain(args, model) -> list[float]:
    """Losses of a loop of plain PyTorch around the loss of transformers, its mask and its shift.

    The samples of packed rows are taken apart and padded.
    """
    train_set, *_ = finetune.load_data(args)

    def loss_of(indices):
        chosen = [train_set[index] for index in indices]
        if args.pack:
            chosen = [train_set.samples[i] for n in indices for i in train_set.rows[n]]
        tokens, learned, *_ = finetune.collate(chosen)
        lengths = torch.tensor([[len(row)] for row, _ in chosen])
        mask = (torch.arange(tokens.shape[1]) < lengths).long()
        return model(tokens, attention_mask=mask, labels=tokens.where(learned, -100)).loss

    lengths = [len(tokens) for tokens, *_ in train_set]
    return losses_by_length(args, model, lengths, loss_of)[: args.stop_after_steps]


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize("lora, way, accumulate, packed", quick(WAYS, [([], SHARDED, 4, PACKED)]))
def test_losses_are_those_of_transformers_and_from_pretrained_opens_the_end(
    start, in_double, tmp_path, lora, way, accumulate, packed
):
    more = ["--accumulate", accumulate, *(["--ema", 0.9] if way != 1 else []), *packed]
    compiled = (lora, way, accumulate, packed) == ([], 1, 1, [])
    plan = {"env": {"ACCELERATE_DYNAMO_BACKEND": "EAGER"}} if compiled else {}
    if compiled or accumulate == 4:
        plan["script"] = "in_parts"
    output = start(tmp_path, lora, way, *in_double[-2:], *more, double=True, **plan).output
    losses = logged_losses(tmp_path)
    assert losses == pytest.approx(plain(*make_model(in_double, lora, *packed)), abs=SAME)
    assert len(re.findall("^answer to .+: ", output, re.M)) == 2
    assert len(rows(tmp_path, "epochs")) == 2
    trained = re.search(r"of which ([\d,]+) are trained \(\d+\.\d\d%\)", output)
    assert bool(trained) == bool(lora)
    args, model = make_model(in_double, lora)
    before, folder = logits(model), tmp_path / "pretrained"
    missing = model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys and (lora or not missing.missing_keys)
    opened = open_end(folder, args.base, lora)
    assert torch.equal(logits(opened), logits(model)) and not torch.equal(before, logits(model))


@pytest.mark.parametrize(
    "lora, way",
    quick([*itertools.product(([], LORA), (2, SHARDED)), (FOUR_BITS, 2)], [(LORA, SHARDED)]),
)
def test_a_kill_changes_no_byte_and_with_a_mirror_a_lost_folder_neither(start, tmp_path, lora, way):
    kill, packed = {"signal": [8, signal.SIGKILL]}, [] if lora else PACKED
    packed = [*packed, "--stop-after-steps", 9]
    more = [*packed, "--save-every", 3, "--resume", "auto", "--mirror", tmp_path / "mirror"]
    start(tmp_path / "killed", lora, way, *more, fault=kill, codes=[-signal.SIGKILL, 1])
    shutil.rmtree(tmp_path / "killed")
    assert "copied step-" in start(tmp_path / "killed", lora, way, *more).stdout
    start(tmp_path / "whole", lora, way, *packed)
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    assert_same_bytes(tmp_path / "killed", tmp_path / "whole", f"pretrained/{weights}")


def test_numbers_of_4_bits_are_trained_beside_as_their_values_and_a_resume_is_exact(
    flags, run_main, tmp_path
):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    more = ["--batch-size", 90, "--stop-after-steps", 4, "--eval-every", 2, "--timeout", 60]
    in_one = [*flags, *FOUR_BITS, *more, "--merge", "--resume", "auto", "--run-dir"]
    in_one = [str(part) for part in in_one]
    run_main("examples.finetune", *in_one, f"{tmp_path}/whole")
    for stop in ("3", "4"):
        run_main("examples.finetune", *in_one, f"{tmp_path}/1", "--stop-after-steps", stop)
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "1")]
    assert all(
        "lora_" in name and torch.equal(weights[1][name], weights[0][name]) for name in weights[0]
    )
    (state,) = tmp_path.glob("1/checkpoints/*04/state/model.safetensors")
    assert load_file(state).keys() == weights[0].keys()
    # The same numbers as matrices of float32, in plain PyTorch.
    args, model = make_model(in_one[:-1], [])
    _, whole = make_model(flags, LORA, *map(str, more))
    for name, part in model.named_modules():
        if type(part) is bitsandbytes.nn.Linear4bit:
            values = bitsandbytes.functional.dequantize_4bit(part.weight, part.weight.quant_state)
            whole.get_submodule(name).weight.data = values
    torch.testing.assert_close(logits(model), logits(whole), atol=1e-5, rtol=0)
    expected = plain(args, whole.train())
    assert expected[-1] < expected[0] - 0.01
    assert logged_losses(tmp_path / "whole") == pytest.approx(expected, abs=1e-5)
    opened = open_end(tmp_path / "whole/pretrained", args.base)
    merged = open_model(tmp_path / "whole/merged")
    torch.testing.assert_close(logits(merged), logits(opened), atol=1e-5, rtol=0)
    before = hash_frozen(model)
    for name, value in model.state_dict().items():
        if name.endswith("nested_absmax"):
            value.mul_(2)
    assert hash_frozen(model) != before  # twice as large, and the same numbers of 4 bits


def test_numbers_of_4_bits_need_lora_and_a_whole_model(flags, monkeypatch):
    state = SimpleNamespace(is_fsdp2=True, mixed_precision="no")
    monkeypatch.setattr(pretrained, "AcceleratorState", lambda: state)
    with refused("shards cannot divide"):
        finetune.make_model(parse(finetune.Config, [*flags, *LORA, "--load-4bit"]))
    with refused("--load-4bit"):
        parse(finetune.Config, [*flags, "--load-4bit"]).validate(1)


CHATML = """{% for each in messages %}<|im_start|>{{ each.role }}
{{ each.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture
def tokenizer(flags):
    made = open_tokenizer(flags[-1])
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return made


def test_only_a_finished_run_of_a_language_model_can_be_asked(tmp_path):
    with refused("is not a finished run of a language model: it has no pretrained/tokenizer_conf"):
        ask.main([str(tmp_path), "x"])


def train_on(run_main, folder, tokenizer, model, prompt, *more) -> Path:
    """Learn to say yes; return the folder for from_pretrained."""
    for each in (model, tokenizer):
        each.save_pretrained(folder / "base")
    pair = json.dumps({"prompt": prompt, "answer": "yes"})
    (folder / "pairs.jsonl").write_text(f"{pair}\n" * 100)
    flags = f"--base {folder}/base --data {folder}/pairs.jsonl --run-dir {folder} --learning-rate"
    flags += " 2e-2 --epochs 5 --batch-size 10 --no-pictures"
    if prompt == "lora":
        flags += " --lora 2"
    run_main("examples.finetune", *flags.split(), *more)
    return folder / "pretrained"


def test_an_adapter_is_merged_prompts_are_answered_and_the_folders_open_in_a_pipeline(
    run_main, tokenizer, tmp_path, capfd
):
    tokenizer.chat_template = CHATML
    model = open_model(tokenizer.name_or_path)
    model.resize_token_embeddings(len(tokenizer))
    model.to(torch.bfloat16)
    more = ["--merge", "--pack", "--checkpointing", "--system", "be", "--prompt", "say", "more"]
    adapter = train_on(run_main, tmp_path, tokenizer, model, "lora", *more)
    assert {x.dtype for x in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
    output = capfd.readouterr().out
    assert output.count("\nsay: ") == output.count("\nmore: ") == 5
    (command,) = re.findall(r"^next: python -m trainkit.language.ask (.*)", output, re.MULTILINE)
    ask.main([*shlex.split(command), "say", "more", "--max-new-tokens", "50"])
    first, _, second = output.rpartition("\nsay: ")[2].partition("\nmore: ")
    answered = capfd.readouterr().out  # with the system turn of the run
    assert answered.startswith(f"{first}\n") and second.startswith(answered[len(first) + 1 :])
    assert "first       <|im_start|>system\\nbe<|im_end|>\\n<|im_start|>user" in output
    with torch.no_grad():
        merged = open_model(tmp_path / "merged")
        whole = open_end(adapter, tmp_path / "base")
        assert merged.dtype == torch.bfloat16
        assert (logits(merged) - logits(whole)).abs().max() < 0.05
    for folder in (adapter, tmp_path / "merged"):
        opened = transformers.pipeline("text-generation", model=str(folder))
        turns = [{"role": "system", "content": "be"}, {"role": "user", "content": "lora"}]
        *_, said = opened(turns, max_new_tokens=5, do_sample=False)[0]["generated_text"]
        assert said["role"] == "assistant" and "y" in said["content"]


def test_an_answer_stops_where_those_that_were_learned_end(run_main, tokenizer, tmp_path):
    model = open_model(tokenizer.name_or_path)
    model.resize_token_embeddings(len(tokenizer))  # its settings name <end> and no other
    tokenizer.chat_template = CHATML
    folder = train_on(run_main, tmp_path, tokenizer, model, "say")
    settings = transformers.GenerationConfig.from_pretrained(folder)
    assert tokenizer.decode(settings.eos_token_id) == "<end><|im_end|>"
    ask = "<|im_start|>user\nsay<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer(ask, return_tensors="pt").input_ids
    found = open_model(folder).generate(tokens, max_new_tokens=30)
    assert tokenizer.decode(found[0]) == f"{ask}yes<|im_end|>"


def test_a_base_or_a_package_that_is_not_there_is_one_sentence(flags, monkeypatch):
    args = parse(finetune.Config, [*flags, *LORA])
    for name, call in (("peft", finetune.make_model), ("transformers", finetune.load_data)):
        with monkeypatch.context() as without, refused(f"install {name}`"):
            without.setitem(sys.modules, name, None)
            call(args)
    args.base = "nobody/nothing"
    with refused("--base nobody/nothing: there is no such .*, and it cannot be read from the Hub"):
        finetune.load_data(args)


def test_a_sample_answer_ends_no_run(tokenizer):
    tokenizer.chat_template = None
    config = transformers.GPT2Config(n_positions=16, n_embd=32, n_layer=1, n_head=1)
    config.vocab_size, config.bos_token_id, config.eos_token_id = len(tokenizer), 0, 0
    model = transformers.GPT2LMHeadModel(config)
    model.generation_config.suppress_tokens = [0]  # so that it says as much as it may
    assert not answer(model, tokenizer, [5] * 10).startswith("none")
    model.generate = None
    assert answer(model, tokenizer, [5]).startswith("none, because of TypeError") and model.training
