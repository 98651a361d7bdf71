"""A Hugging Face model is fine-tuned, whole or by LoRA, as transformers itself would do it."""

import codecs
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
from datasets import Dataset
from double import SAME
from loops import changed
from plain import logged_losses, quick
from safetensors.torch import load_file
from sharded import KINDS
from tuned import (
    ASK,
    FLAGS,
    FOUR_BITS,
    GPT,
    HUMAN,
    LORA,
    SAY,
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
from trainkit.language import conversations, formats, pretrained
from trainkit.texts.encoders import make_encoder
from trainkit.tools import ask

transformers, peft = map(pytest.importorskip, ("transformers", "peft"))

PACKED = ["--pack", "--max-tokens", "64", "--epochs", "4"]  # 7 steps an epoch
# LoRA, a number of processes without sharding or two that shard in this way, --accumulate, pack.
WAYS = itertools.product(([], LORA), (1, 2, 3, *KINDS), (1, 4), ([], PACKED))


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


def test_batches_of_many_lengths_wait_for_no_plans_of_cudnn(flags, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", calls.append)
    make_model(flags, [])
    encoder = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9
    )
    make_encoder(encoder.to_dict())
    assert calls == [False, False]


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


@pytest.mark.parametrize(
    "lora, way, accumulate, packed", quick(WAYS, [([], KINDS[0], 4, []), (LORA, 2, 4, PACKED)])
)
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
    assert len(re.findall("^question: .+\nanswer: ", output, re.M)) == 2
    assert len(rows(tmp_path, "epochs")) == 2
    trained = re.search(r"of which ([\d,]+) are trained \(\d+\.\d\d%\)", output)
    assert bool(trained) == bool(lora)
    args, model = make_model(in_double, lora)
    before, folder = logits(model), tmp_path / "pretrained"
    missing = model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys and (lora or not missing.missing_keys)
    opened = open_end(folder, args.base, lora)
    assert torch.equal(logits(opened), logits(model)) and not torch.equal(before, logits(model))
    assert "| seed | 0 |" in (folder / "README.md").read_text()


def test_a_resume_with_other_rows_is_refused(run_main, flags, tmp_path, monkeypatch):
    flags = [*flags, "--run-dir", f"{tmp_path}/run", "--resume", "auto", "--stop-after-steps"]
    run_main("examples.finetune", *flags, "2")
    monkeypatch.setattr(finetune, "row_size", lambda *_: (0, {}))
    with refused(r"metadata\[shared rows\] is '512' there and '0' here"):
        run_main("examples.finetune", *flags, "3")


@pytest.mark.parametrize(
    "lora, way",
    quick([*itertools.product(([], LORA), (2, *KINDS)), (FOUR_BITS, 2)], [(LORA, KINDS[1])]),
)
def test_a_kill_changes_no_byte_and_with_a_mirror_a_lost_folder_neither(start, tmp_path, lora, way):
    kill, packed = {"signal": [13, signal.SIGKILL]}, [] if lora else PACKED
    more = [*packed, "--save-every", 5, "--resume", "auto", "--mirror", tmp_path / "mirror"]
    start(tmp_path / "killed", lora, way, *more, fault=kill, codes=[-signal.SIGKILL, 1])
    shutil.rmtree(tmp_path / "killed")
    assert "copied step-" in start(tmp_path / "killed", lora, way, *more).stdout
    start(tmp_path / "whole", lora, way, *packed)
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    assert_same_bytes(tmp_path / "killed", tmp_path / "whole", f"pretrained/{weights}")


def test_numbers_of_4_bits_are_trained_beside_as_their_values_and_a_resume_is_exact(
    start, flags, run_main, tmp_path
):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    more = ["--batch-size", 90, "--stop-after-steps", 6, "--eval-every", 2, "--timeout", 60]
    start(tmp_path / "2", FOUR_BITS, 2, *more)
    in_one = [*flags, *FOUR_BITS, *more, "--merge", "--resume", "auto", "--run-dir"]
    in_one = [str(part) for part in in_one]
    run_main("examples.finetune", *in_one, f"{tmp_path}/whole")
    for stop in ("3", "6"):
        run_main("examples.finetune", *in_one, f"{tmp_path}/1", "--stop-after-steps", stop)
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "1")]
    assert all(
        "lora_" in name and torch.equal(weights[1][name], weights[0][name]) for name in weights[0]
    )
    (state,) = tmp_path.glob("1/checkpoints/*06/state/model.safetensors")
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
    for name in ("2", "whole"):
        assert logged_losses(tmp_path / name) == pytest.approx(expected, abs=1e-5)
    opened = open_end(tmp_path / "whole/pretrained", args.base)
    merged = open_model(tmp_path / "whole/merged")
    torch.testing.assert_close(logits(merged), logits(opened), atol=1e-5, rtol=0)
    before = hash_frozen(model)
    for name, value in model.state_dict().items():
        if name.endswith("nested_absmax"):
            value.mul_(2)
    assert hash_frozen(model) != before  # twice as large, and the same numbers of 4 bits


@pytest.mark.parametrize(
    "more, message",
    [([], "give --lora a rank"), (LORA, "shards cannot divide"), (LORA, "install bitsandbytes`")],
)
def test_numbers_of_4_bits_need_lora_a_whole_model_and_a_package(flags, monkeypatch, more, message):
    state = SimpleNamespace(is_fsdp2="shards" in message, mixed_precision="no")
    monkeypatch.setattr(pretrained, "AcceleratorState", lambda: state)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with refused(message):
        finetune.make_model(parse(finetune.Config, [*flags, *more, "--load-4bit"]))


CHATML = """{% for each in messages %}<|im_start|>{{ each.role }}
{{ each.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THINKS_LAST = "each.content if loop.last else each.content.split('</think>')[-1]"
TEMPLATES = {
    "chatml": CHATML,
    "never thinks": CHATML.replace("each.content", "each.content.split('</think>')[-1]"),
    "thinks last": CHATML.replace("each.content", THINKS_LAST),
    "no end": "{% for each in messages %}[{{ each.role }}]{{ each.content }}{% endfor %}",
    "none": None,
    "no tokens": None,  # nor one that ends a text or fills a row
    "calls": "{% for each in tools or [] %}{{ each.function.name }}{% endfor %}"
    + CHATML.replace("each.content", "each.tool_calls|tojson if each.tool_calls else each.content"),
    "alternates": "{% for each in messages %}"
    "{% if each.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if (each.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ each.role }}]{{ each.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
}
SHORT, LONG = {"prompt": "a", "answer": "4"}, {"prompt": "x = 1 ; " * 90, "answer": "4"}
TALK, THOUGHT = [ASK, SAY], SAY | {"content": "<think>2</think>4"}
CALLING = {"from": "function_call", "value": '{"name": "f"}'}
OBSERVED = {"from": "observation", "value": "5"}
CALL = {"name": "f", "arguments": '{"n": 1}'}
TOOL = SAY | {"content": None, "tool_calls": [{"function": CALL}]}
CALLED = '[{"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}]'
ODD, PART = "\u00e9 e\u0301 \u4f60\U0001f468\u200d\U0001f469 \u202e", {"type": "text", "text": "4"}
FOUR, NOT_LEFT = ("4<|im_end|>\n", "on has an answer, or a token of one .* 64: .* larger")


def chat(*turns) -> dict:
    return {"messages": [*turns]}


# Rows, what is learned in the first samples, what the plan says or why there is none.
OF_CHATML = [
    ([SHORT], [FOUR], {"end": "<.im_end.> after an answer, learned in 3 of 3"}),
    ([SHORT, LONG], [FOUR] * 2, {"truncated": "3 of 6 .*-tokens 64", "dropped": "3 of 6"}),
    ([SHORT | {"answer": LONG["prompt"]}], [], {"truncated": "3 of 3", "end": "in 0 of 3"}),
    ([LONG, *[SHORT] * 4], [FOUR] * 2, {"truncated": "3 of 15", "dropped": "3 of 15"}),
    ([LONG], [], f"train {NOT_LEFT}"),
    ([chat(SAY, *TALK, SAY, ASK)], [FOUR * 3], {}),
    ([chat(*TALK) | {"tools": [CALL]}], [FOUR], {"template": "3 of 3 .* 'f'"}),
    ([{"prompt": [*TALK, ASK], "completion": [SAY]}], [FOUR], {}),
    (
        [{"conversations": [HUMAN, GPT, CALLING, OBSERVED, GPT], "system": "be", "tools": "[]"}],
        [f"{FOUR}<|im_end|>\n{FOUR}"],
        {"first": "system..be.*tool..5", "template": "3 of 3 .* 'f'"},
    ),
    (
        [{"conversations": [CALLING | {"value": "{"}]}],
        [],
        "line 1 .* calls of tools are not JSON.* '{'",
    ),
    ([chat(*TALK, ASK, SAY | {"weight": 0})], [FOUR], {}),
    ([{"question": "2?", "response": "4"}], [FOUR], {}),
    ([SHORT | {"label": False}], [], "line 1 of .* its label is false"),
    ([SHORT | {"images": ["a"]}], [], "line 1 of .* has images, and only texts"),
    ([{"instruction": "+", "input": "2", "output": "4"}], [FOUR], {"first": r"\+\\n.n2"}),
    ([{"instruction": "", "input": "2", "output": "4"}], [FOUR], {"first": "r.n2<"}),
    ([{"text": "x = 4", "meta": 1}], [" = 4<end>"], {"not read": "^meta$"}),
    ([chat(ASK)], [], "nothing is learned of 3 of 3 rows: they have no turn of an assistant"),
    ([chat(ASK | {"content": ""}, SAY | {"content": " "})], [" <|im_end|>\n"], {"empty": "3 of 3"}),
    (
        [chat(*each) for each in (TALK, [], [SAY | {"role": "system"}])],
        [FOUR],
        {"dropped": "6 of 9"},
    ),
    ([chat(ASK, SAY | {"content": ODD})], [f"{ODD}<|im_end|>\n"], {}),
    ([chat(*TALK), chat(*TALK * 5000)], [FOUR * 3], {"truncated": "3 of 6"}),
    ([chat(ASK | {"content": [PART]}, SAY | {"content": [PART, PART]})], [f"44{FOUR[1:]}"], {}),
    ([chat(ASK | {"content": [PART, {"type": "image"}]}, SAY)], [], "line 1 of .* holds image"),
    ([{"question": "2?"}], [], "line 1 of .* has no columns of a known"),
    ([SHORT | {"answer": None}], [], "line 1 of .* has no text"),
    ([[1]], [], "line 1 of .* has no columns of a known"),
]
CASES = [
    *(("chatml", *case) for case in OF_CHATML),
    ("no end", [SHORT], ["[assistant]4"], {"end": "no token ends an answer"}),
    ("none", [SHORT], ["4<end>"], {"first": r"^a\[\[4<end>]]$"}),
    ("no tokens", [SHORT], ["4"], {"end": "no token ends an answer"}),
    (
        "never thinks",
        [SHORT | {"answer": "<think>2</think>4"}],
        [FOUR],
        {"template": "3 of 3 .*<th"},
    ),
    ("thinks last", [chat(ASK, THOUGHT, *TALK)], [f"<think>2</think>{FOUR}", FOUR], {}),
    ("calls", [chat(ASK, TOOL)], [CALLED + FOUR[1:]], {}),
    ("calls", [{"messages": TALK, "tools": json.dumps([CALL])}], [FOUR], {"first": "^f<"}),
    ("none", [chat(*TALK, *TALK)], [], "line 1 of .* no chat template"),
    ("alternates", [chat(*TALK, SAY)], [], "line 1 of .* must alternate"),
    ("alternates", [chat(SAY | {"role": "system"}, *TALK)], [], "line 1 .* no system"),
]


@pytest.fixture
def tokenizer(flags):
    made = open_tokenizer(flags[-1])
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return made


@pytest.mark.parametrize("template, given, learned, said", CASES)
def test_what_the_assistant_says_and_its_end_are_learned_and_what_is_not_is_said(
    tokenizer, tmp_path, template, given, learned, said
):
    tokenizer.chat_template, path = TEMPLATES[template], tmp_path / "rows.jsonl"
    if template == "no tokens":
        tokenizer.eos_token = tokenizer.pad_token = None
    path.write_text("".join(f"{json.dumps(row)}\n" for row in given * 3))
    if isinstance(said, str):
        with refused(said):
            conversations.make_chat_sets(tokenizer, str(path), 64)
        return
    Dataset.from_list(given * 3).save_to_disk(tmp_path / "saved")
    Dataset.from_list(given * 3).to_parquet(tmp_path / "rows.parquet")
    for source in (path, tmp_path / "saved", tmp_path / "rows.parquet"):
        train_set, _, _, plan, *_ = conversations.make_chat_sets(tokenizer, str(source), 64, 99)
        texts = [tokenizer.decode(tokens[where]) for tokens, where in train_set]
        assert texts[: len(learned)] == learned and all(texts)
        assert plan.keys() == {"data", "end", "first", "twice", *said}
        assert all(re.search(words, plan[name]) for name, words in said.items())


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
    tokenizer.chat_template = TEMPLATES["chatml"]
    model = open_model(tokenizer.name_or_path)
    model.resize_token_embeddings(len(tokenizer))
    model.to(torch.bfloat16)
    more = ["--merge", "--pack", "--checkpointing", "--system", "be", "--prompt", "say", "more"]
    adapter = train_on(run_main, tmp_path, tokenizer, model, "lora", *more)
    assert {x.dtype for x in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
    output = capfd.readouterr().out
    assert output.count("\nsay: ") == output.count("\nmore: ") == 5
    (command,) = re.findall(r"^next: python -m trainkit.tools.ask (.*)", output, re.MULTILINE)
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


@pytest.mark.parametrize(
    "template, end, prompt", [("chatml", "<end>", "say"), ("none", "<|im_end|>", "lora")]
)
def test_an_answer_stops_where_those_that_were_learned_end(
    run_main, tokenizer, tmp_path, template, end, prompt
):
    model = open_model(tokenizer.name_or_path)
    model.resize_token_embeddings(len(tokenizer))  # its settings name <end> and no other
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATES[template], end
    folder = train_on(run_main, tmp_path, tokenizer, model, prompt)
    settings = transformers.GenerationConfig.from_pretrained(folder)
    assert tokenizer.decode(settings.eos_token_id) == "<end><|im_end|>"
    if prompt == "say":
        opened = open_model(folder)
        ask = "<|im_start|>user\nsay<|im_end|>\n<|im_start|>assistant\n"
        found = opened.generate(tokenizer(ask, return_tensors="pt").input_ids, max_new_tokens=30)
        assert tokenizer.decode(found[0]) == f"{ask}yes<|im_end|>"


@pytest.mark.parametrize("prompt", [" x" * 100, "", "broken"])
def test_a_sample_answer_ends_no_run(run_main, tokenizer, tmp_path, prompt, monkeypatch, capfd):
    tokenizer.chat_template = None
    config = transformers.GPT2Config(n_positions=128, n_embd=32, n_layer=1, n_head=1)
    config.vocab_size, config.bos_token_id, config.eos_token_id = len(tokenizer), 0, 0
    if prompt == "broken":
        monkeypatch.setattr(transformers.GPT2LMHeadModel, "generate", None)
    model = transformers.GPT2LMHeadModel(config)
    model.generation_config.suppress_tokens = [0]  # so that it says as much as it may
    train_on(run_main, tmp_path, tokenizer, model, prompt)
    shown = re.findall(r"\nanswer: (none, because of \w+)?", capfd.readouterr().out)
    reason = "none, because of TypeError" if prompt == "broken" else ""
    assert shown == [reason] * 5


def test_a_line_that_is_no_json_is_named_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{json.dumps(SHORT)}\n \n\n")
    assert len(formats.read_conversations(formats.read_conversation_rows(str(path)))[0]) == 1
    path.write_text(f"{json.dumps(SHORT)}\n{{\n")
    with refused(f"^line 2 of {path} is not JSON"):
        formats.read_conversations(formats.read_conversation_rows(str(path)))


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.json"])
def test_a_byte_order_mark_says_how_json_is_read_and_another_encoding_is_named(tmp_path, name):
    path = tmp_path / name
    row = {"prompt": "\u00e4", "completion": "\u4e2d"}
    content = f"{json.dumps(row, ensure_ascii=False)}\n" * 2
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        path.write_bytes(content.encode(encoding))
        assert [row for _, row in formats.read_conversation_rows(str(path))] == [row] * 2
    in_cp1252 = content.replace("\u4e2d", "b").encode("cp1252")
    odd = content.encode("utf-16") + b"\n"  # UTF-16 has two bytes for each letter
    for wrong in (in_cp1252, codecs.BOM_UTF8 + in_cp1252, odd, codecs.BOM_UTF32_LE + b"{}"):
        path.write_bytes(wrong)
        with refused(rf"^(line 1 of )?{path} is not in UTF-8, as JSON must be"):
            [*formats.read_conversation_rows(str(path))]


@pytest.mark.parametrize("indent, rows", [(None, [SHORT] * 2), (1, [SHORT] * 2), (1, SHORT)])
def test_json_is_a_list_or_a_row_or_has_one_in_each_line(tmp_path, indent, rows):
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(rows, indent=1) if indent else "\n".join(map(json.dumps, rows)))
    read = [row for _, row in formats.read_conversation_rows(str(path))]
    assert read == (rows if isinstance(rows, list) else [rows])


def test_a_base_or_a_package_that_is_not_there_is_one_sentence(flags, monkeypatch):
    args = parse(finetune.Config, [*flags, *LORA])
    for name, call in (("peft", finetune.make_model), ("transformers", finetune.load_data)):
        with monkeypatch.context() as without, refused(f"install {name}`"):
            without.setitem(sys.modules, name, None)
            call(args)
    args.base = "nobody/nothing"
    with refused("--base nobody/nothing: there is no such .*, and it cannot be read from the Hub"):
        finetune.load_data(args)


def test_models_are_trained_that_are_in_evaluation_mode_as_from_pretrained_returns_them(tmp_path):
    modes = []
    changed((r"run\.begin\(", "one.eval(), two.eval(); run.begin("))(
        *("--run-dir", tmp_path),
        body=lambda run, _: modes.extend(model.training for model in run.models),
    )
    assert modes and all(modes)
