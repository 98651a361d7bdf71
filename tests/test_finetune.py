"""A Hugging Face model is fine-tuned, whole or by LoRA, as transformers itself would do it."""

import itertools
import json
import re
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import rows
from datasets import Dataset
from double import SAME
from safetensors.torch import load_file
from test_shards import KINDS, env

from examples import finetune
from trainkit.config import parse
from trainkit.data import conversations
from trainkit.errors import UsageError
from trainkit.loaders import EpochBatches
from trainkit.orders import by_length

transformers, peft = map(pytest.importorskip, ("transformers", "peft"))

MODULES = ["peft", "transformers.models.llama.modeling_llama", "transformers.generation"]
# 270 pairs: 11 steps of 24 and one of 6, which leaves some processes without a sample.
FLAGS = "--batch-size 24 --epochs 2 --stop-after-steps 20 --log-every 1 --learning-rate 3e-3"
FLAGS += " --schedule constant --warmup 0 --clip-norm inf --eval-every 6 --no-pictures"
PACKED = ["--pack", "--max-tokens", "64", "--epochs", "4"]  # 7 steps an epoch
# --lora, a number of processes without sharding or two that shard in this way, --accumulate, pack.
WAYS = itertools.product((None, 4), (1, 2, 3, *KINDS), (1, 4), ([], PACKED))


def quick(ways: Iterable[tuple], chosen: list[tuple]) -> list[Any]:
    """The ways, of which those that are not chosen are slow."""
    return [pytest.param(*way, marks=[pytest.mark.slow] * (way not in chosen)) for way in ways]


def make_flags(nursery: Any, folder: Path, flags: str, name: str, num: int) -> list[str]:
    """Make rows, and the model, in float64 as well; return what all runs have in common."""
    for where, double in (folder / "double", True), (folder, False):
        words = "examples/docstrings.py", "--folder", where, "--width", 32, "--layers", 1
        made = nursery.run(*words, double=double, modules=MODULES)
        assert made.codes == [0], made.output
    lines = (folder / f"{name}.jsonl").read_text().splitlines()[:num]
    (folder / "few.jsonl").write_text("\n".join(lines))
    return [*flags.split(), "--data", f"{folder}/few.jsonl", "--base", f"{folder}/base"]


def start_run(
    nursery: Any,
    flags: list[str],
    run_dir: Path,
    lora: int | None,
    way: Any,
    *args: object,
    script: str,
    **plan: Any,
) -> Any:
    args = *flags, *(["--lora", lora] if lora else []), "--run-dir", run_dir, *args
    kind, world = (way, 2) if way in KINDS else (None, way)
    plan = {"timeout": 120, "modules": MODULES, **plan}
    plan["env"] = env(kind, HF_DATASETS_CACHE=f"{run_dir}-cache") | plan.get("env", {})
    outcome = nursery.run(script, *args, world=world, **plan)
    if "fault" not in plan:
        assert outcome.codes == [0] * world, outcome.output
        assert f"  {world} process" in outcome.output
        assert ("sharded" in outcome.output) == (kind is not None)
    return outcome


@pytest.fixture(scope="module")
def flags(nursery, tmp_path_factory):
    return make_flags(nursery, tmp_path_factory.mktemp("made"), FLAGS, "pairs", 300)


@pytest.fixture
def in_double(float64_default, flags, monkeypatch):
    """The flags of a run in float64; this process computes in it, the loss of transformers too."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return [*flags[:-1], flags[-1].replace("/base", "/double/base")]


@pytest.fixture(scope="module")
def start(nursery, flags):
    return partial(start_run, nursery, flags, script="examples/finetune.py")


def make_model(flags: list[str], lora: int | None, *more: str) -> tuple[Any, Any]:
    args = parse(finetune.Config, [*flags, *(["--lora", str(lora)] if lora else []), *more])
    torch.manual_seed(0)
    return args, finetune.make_model(args)


def plain(flags: list[str], lora: int | None, *more: str) -> list[float]:
    """Losses of a loop of plain PyTorch around the loss of transformers, its mask and its shift.

    The samples of packed rows are taken apart and padded.
    """
    args, model = make_model(flags, lora, *more)
    train_set, *_ = finetune.load_data(args)
    adam = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=0.0)
    lengths = [len(tokens) for tokens, *_ in train_set]
    sorts = by_length(lengths, args.batch_size, seed=0)
    order, losses = EpochBatches(len(train_set), args.batch_size, order=sorts), []
    for epoch in range(args.epochs):
        order.set_position(epoch, 0)
        for batch in order:
            chosen = [train_set[index] for index in batch.values.tolist()]
            if args.pack:
                chosen = [train_set.samples[i] for n in batch.values for i in train_set.rows[n]]
            tokens, learned = finetune.collate(chosen)
            lengths = torch.tensor([[len(row)] for row, _ in chosen])
            mask = (torch.arange(tokens.shape[1]) < lengths).long()
            labels = tokens.where(learned, -100)
            loss = model(tokens, attention_mask=mask, labels=labels).loss
            losses.append(loss.item())
            adam.zero_grad()
            loss.backward()
            adam.step()
    return losses[: args.stop_after_steps]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize(
    ("lora", "way", "accumulate", "packed"),
    quick(WAYS, [(None, KINDS[0], 4, []), (4, 2, 4, PACKED)]),
)
def test_losses_are_those_of_transformers_and_from_pretrained_opens_the_end(
    start, in_double, tmp_path, lora, way, accumulate, packed
):
    more = ["--accumulate", accumulate, *(["--ema", 0.9] if way != 1 else []), *packed]
    plan = {"double": True} | ({"script": "in_parts"} if accumulate == 4 else {})
    output = start(tmp_path, lora, way, *in_double[-2:], *more, **plan).output
    losses = [row["train_loss"] for row in rows(tmp_path, "steps")]
    assert losses == pytest.approx(plain(in_double, lora, *packed), abs=SAME)
    assert output.count("answer: ") == len(rows(tmp_path, "epochs")) == (6 if packed else 4)
    args, model = make_model(in_double, lora)
    before, folder = logits(model), tmp_path / "pretrained"
    missing = model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys and (lora or not missing.missing_keys)
    opened = transformers.AutoModelForCausalLM.from_pretrained(args.base if lora else folder)
    if lora:
        opened = peft.PeftModel.from_pretrained(opened, folder)
    assert torch.equal(logits(opened), logits(model)) and not torch.equal(before, logits(model))
    assert transformers.AutoTokenizer.from_pretrained(folder).eos_token == "<end>"
    assert "| seed | 0 |" in (folder / "README.md").read_text()


@pytest.mark.slow
def test_losses_in_parts_are_those_of_transformers_in_a_compiled_model(start, in_double, tmp_path):
    plan = {"script": "in_parts", "double": True, "env": {"ACCELERATE_DYNAMO_BACKEND": "EAGER"}}
    start(tmp_path, None, 1, *in_double[-2:], **plan)
    losses = [row["train_loss"] for row in rows(tmp_path, "steps")]
    assert losses == pytest.approx(plain(in_double, None), abs=SAME)


def test_a_resume_with_other_rows_is_refused(run_main, flags, tmp_path, monkeypatch):
    flags = [*flags, "--run-dir", f"{tmp_path}/run", "--resume", "auto", "--stop-after-steps"]
    run_main("examples.finetune", *flags, "2")
    monkeypatch.setattr(finetune, "row_size", lambda *_: (0, {}))
    with pytest.raises(UsageError, match=r"metadata\[shared rows\] is '512' there and '0' here"):
        run_main("examples.finetune", *flags, "3")


@pytest.mark.parametrize(
    ("lora", "way"), quick(itertools.product((None, 4), (2, *KINDS)), [(4, KINDS[1])])
)
def test_a_kill_changes_no_byte(start, tmp_path, lora, way):
    kill, packed = {"signal": [14, signal.SIGKILL]}, [] if lora else PACKED
    assert 0 not in start(tmp_path / "killed", lora, way, *packed, fault=kill).codes
    for name in ("killed", "whole"):
        start(tmp_path / name, lora, way, *packed, "--resume", "auto")
    files = sorted((tmp_path / "whole").glob("**/pretrained/*.safetensors"))
    for path in (tmp_path / "whole" / "metrics.jsonl", *files):
        killed = tmp_path / "killed" / path.relative_to(tmp_path / "whole")
        assert path.read_bytes() == killed.read_bytes(), path.name


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
ASK, SAY = {"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}
TALK, THOUGHT = [ASK, SAY], SAY | {"content": "<think>2</think>4"}
SHARED = [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "4"}]
SHARED += [{"from": "function_call", "value": '{"name": "f"}'}]
SHARED += [{"from": "observation", "value": "5"}]
CALL: dict[str, Any] = {"name": "f", "arguments": '{"n": 1}'}
TOOL = SAY | {"content": None, "tool_calls": [{"function": CALL}]}
CALLED = '[{"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}]'
ODD, PART = "\u00e9 e\u0301 \u4f60\U0001f468\u200d\U0001f469 \u202e", {"type": "text", "text": "4"}
FOUR, NOT_LEFT = (
    "4<|im_end|>\n",
    "on has an answer, or a token of one .* 64: .* larger",
)
# A template, rows, what is learned in the first samples, what the plan says or why there is none.
CASES = [
    ("chatml", [SHORT], [FOUR], {"end": "<.im_end.> after an answer, learned in 3 of 3"}),
    ("no end", [SHORT], ["[assistant]4"], {"end": "no token ends an answer"}),
    ("none", [SHORT], ["4<end>"], {"first": r"^a\[\[4<end>]]$"}),
    ("no tokens", [SHORT], ["4"], {"end": "no token ends an answer"}),
    (
        "never thinks",
        [SHORT | {"answer": "<think>2</think>4"}],
        [FOUR],
        {"template": "3 of 3 .*<th"},
    ),
    ("chatml", [SHORT, LONG], [FOUR] * 2, {"cut": "3 of 6 .*-tokens 64", "dropped": "3 of 6"}),
    ("chatml", [SHORT | {"answer": LONG["prompt"]}], [], {"cut": "3 of 3", "end": "in 0 of 3"}),
    ("chatml", [LONG], [], f"train {NOT_LEFT}"),
    ("chatml", [LONG, *[SHORT] * 4], [], f"evaluate {NOT_LEFT}"),
    ("chatml", [{"messages": [SAY | {"role": "system"}, *TALK, *TALK]}], [FOUR * 2], {}),
    ("thinks last", [{"messages": [ASK, THOUGHT, *TALK]}], [f"<think>2</think>{FOUR}", FOUR], {}),
    ("chatml", [{"messages": [SAY, *TALK, SAY, ASK]}], [FOUR * 3], {}),
    ("chatml", [{"messages": [ASK, TOOL]}], ["<|im_end|>\n"], {"template": "3 of 3 .* 'f'"}),
    ("calls", [{"messages": [ASK, TOOL]}], [CALLED + FOUR[1:]], {}),
    ("calls", [{"messages": TALK, "tools": json.dumps([CALL])}], [FOUR], {"first": "^f<"}),
    ("chatml", [{"messages": TALK, "tools": [CALL]}], [FOUR], {"template": "3 of 3 .* 'f'"}),
    ("chatml", [{"prompt": [*TALK, ASK], "completion": [SAY]}], [FOUR], {}),
    ("chatml", [{"prompt": "2?", "completion": "4"}], [FOUR], {}),
    ("chatml", [{"conversations": SHARED[:2]}], [FOUR], {}),
    (
        "chatml",
        [{"conversations": [*SHARED, SHARED[1]], "system": "be", "tools": "[]"}],
        [f"{FOUR}<|im_end|>\n{FOUR}"],
        {"first": "system..be.*tool..5", "template": "3 of 3 .* 'f'"},
    ),
    ("chatml", [{"conversations": [SHARED[2] | {"value": "{"}]}], [], "has no text, or no turns"),
    ("chatml", [{"messages": [*TALK, ASK, SAY | {"weight": 0}]}], [FOUR], {}),
    ("chatml", [{"question": "2?", "response": "4"}], [FOUR], {}),
    ("chatml", [SHORT | {"label": False}], [], "line 1 of .* its label is false"),
    ("chatml", [SHORT | {"images": ["a"]}], [], "line 1 of .* has images, and only texts"),
    (
        "chatml",
        [{"instruction": "+", "input": "2", "output": "4"}],
        [FOUR],
        {"first": r"\+\\n.n2"},
    ),
    ("chatml", [{"instruction": "", "input": "2", "output": "4"}], [FOUR], {"first": "r.n2<"}),
    ("chatml", [{"text": "x = 4", "meta": 1}], [" = 4<end>"], {}),
    ("chatml", [{"messages": [ASK]}], [], f"train {NOT_LEFT}"),
    ("none", [{"messages": [*TALK, *TALK]}], [], "line 1 of .* no chat template"),
    (
        "chatml",
        [{"messages": [ASK | {"content": ""}, SAY | {"content": " "}]}],
        [" <|im_end|>\n"],
        {"empty": "3 of 3"},
    ),
    (
        "chatml",
        [{"messages": TALK}, {"messages": [SAY | {"role": "system"}]}],
        [FOUR],
        {"dropped": "3 of 6"},
    ),
    ("chatml", [{"messages": TALK}, {"messages": []}], [FOUR], {"dropped": "3 of 6"}),
    ("alternates", [{"messages": [*TALK, SAY]}], [], "line 1 of .* must alternate"),
    ("alternates", [{"messages": [SAY | {"role": "system"}, *TALK]}], [], "line 1 .* no system"),
    ("chatml", [{"messages": [ASK, SAY | {"content": ODD}]}], [f"{ODD}<|im_end|>\n"], {}),
    ("chatml", [{"messages": TALK}, {"messages": TALK * 5000}], [FOUR * 3], {"cut": "3 of 6"}),
    (
        "chatml",
        [{"messages": [ASK | {"content": [PART]}, SAY | {"content": [PART, PART]}]}],
        [f"44{FOUR[1:]}"],
        {},
    ),
    (
        "chatml",
        [{"messages": [ASK | {"content": [PART, {"type": "image"}]}, SAY]}],
        [],
        "line 1 of .* holds image",
    ),
    ("chatml", [{"question": "2?"}], [], "line 1 of .* has not the columns"),
    ("chatml", [{"messages": [{"role": "assistant"}]}], [], "line 1 of .* has no text"),
    ("chatml", [SHORT | {"answer": None}], [], "line 1 of .* has no text"),
    ("chatml", [[1]], [], "line 1 of .* has not the columns"),
]


@pytest.fixture
def tokenizer(flags):
    made = transformers.AutoTokenizer.from_pretrained(flags[-1])
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return made


@pytest.mark.parametrize(("template", "given", "learned", "said"), CASES)
def test_what_the_assistant_says_and_its_end_are_learned_and_what_is_not_is_said(
    tokenizer, tmp_path, template, given, learned, said
):
    tokenizer.chat_template, path = TEMPLATES[template], tmp_path / "rows.jsonl"
    if template == "no tokens":
        tokenizer.eos_token = tokenizer.pad_token = None
    path.write_text("".join(f"{json.dumps(row)}\n" for row in given * 3))
    if isinstance(said, str):
        with pytest.raises(UsageError, match=said):
            conversations.make_sets(tokenizer, str(path), 64)
        return
    Dataset.from_list(given * 3).save_to_disk(tmp_path / "saved")
    for source in (path, tmp_path / "saved"):
        train_set, _, _, plan, _ = conversations.make_sets(tokenizer, str(source), 64, 99)
        texts = [tokenizer.decode(tokens[where]) for tokens, where in train_set]
        assert texts[: len(learned)] == learned and all(texts)
        assert plan.keys() == {"data", "end", "first", *said}
        assert all(re.search(words, plan[name]) for name, words in said.items())


def train_on(
    run_main: Callable, folder: Path, tokenizer: Any, model: Any, prompt: str, *more: str
) -> Path:
    """Learn to say yes; return the folder for from_pretrained."""
    for each in (model, tokenizer):
        each.save_pretrained(folder / "base")
    pair = json.dumps({"prompt": prompt, "answer": "yes"})
    (folder / "pairs.jsonl").write_text(f"{pair}\n" * 100)
    flags = f"--base {folder}/base --data {folder}/pairs.jsonl --run-dir {folder} --learning-rate"
    flags += " 2e-2 --epochs 5 --batch-size 10 --no-pictures" + " --lora 2" * (prompt == "lora")
    run_main("examples.finetune", *flags.split(), *more)
    return folder / "pretrained"


def test_an_adapter_is_merged_prompts_are_answered_and_the_folders_open_in_a_pipeline(
    run_main, tokenizer, tmp_path, capfd
):
    tokenizer.chat_template = TEMPLATES["chatml"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tokenizer.name_or_path)
    model.resize_token_embeddings(len(tokenizer))
    model.to(torch.bfloat16)
    more = ["--merge", "--pack", "--checkpointing", "--system", "be", "--prompt", "say", "more"]
    adapter = train_on(run_main, tmp_path, tokenizer, model, "lora", *more)
    assert {x.dtype for x in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
    output = capfd.readouterr().out
    assert output.count("\nsay: ") == output.count("\nmore: ") == 5
    assert "first       <|im_start|>system\\nbe<|im_end|>\\n<|im_start|>user" in output
    with torch.no_grad():
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        whole = peft.PeftModel.from_pretrained(base, adapter)
        assert merged.dtype == torch.bfloat16
        assert (logits(merged) - logits(whole)).abs().max() < 0.05
    for folder in (adapter, tmp_path / "merged"):
        opened = transformers.pipeline("text-generation", model=str(folder))
        assert opened.tokenizer.chat_template == TEMPLATES["chatml"]
        turns = [{"role": "system", "content": "be"}, {"role": "user", "content": "lora"}]
        said = opened(turns, max_new_tokens=5, do_sample=False)[0]["generated_text"]
        assert said[-1]["role"] == "assistant" and "y" in said[-1]["content"]


@pytest.mark.parametrize(
    ("template", "end", "prompt"), [("chatml", "<end>", "say"), ("none", "<|im_end|>", "lora")]
)
def test_an_answer_stops_where_those_that_were_learned_end(
    run_main, tokenizer, tmp_path, template, end, prompt
):
    model = transformers.AutoModelForCausalLM.from_pretrained(tokenizer.name_or_path)
    model.resize_token_embeddings(len(tokenizer))  # its settings name <end> and no other
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATES[template], end
    folder = train_on(run_main, tmp_path, tokenizer, model, prompt)
    settings = transformers.GenerationConfig.from_pretrained(folder)
    assert tokenizer.decode(settings.eos_token_id) == "<end><|im_end|>"
    if prompt == "say":
        opened = transformers.AutoModelForCausalLM.from_pretrained(folder)
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
    assert shown == ["none, because of TypeError" * (prompt == "broken")] * 5


@pytest.mark.parametrize("line", ["", "{"])
def test_a_line_that_is_no_json_is_named(tmp_path, line):
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{json.dumps(SHORT)}\n{line}\n")
    with pytest.raises(UsageError, match=f"^line 2 of {path} is no JSON"):
        conversations.read_conversations(str(path))


@pytest.mark.parametrize(("indent", "rows"), [(None, [SHORT] * 2), (1, [SHORT] * 2), (1, SHORT)])
def test_json_is_a_list_or_a_row_or_has_one_in_each_line(tmp_path, indent, rows):
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(rows, indent=1) if indent else "\n".join(map(json.dumps, rows)))
    read = [row for _, row in conversations.read_rows(str(path))]
    assert read == (rows if isinstance(rows, list) else [rows])


def test_parquet_holds_the_same_samples_and_a_base_that_is_not_there_ends_in_a_sentence(
    flags, tmp_path
):
    args = parse(finetune.Config, flags)
    samples, pairs = finetune.load_data(args)[0], Dataset.from_json(args.data)
    args.data = str(tmp_path / "few.parquet")
    pairs.to_parquet(args.data)
    assert repr(finetune.load_data(args)[0]) == repr(samples)
    args.base = "nobody/nothing"
    with pytest.raises(UsageError, match="--base nobody/nothing cannot be read"):
        finetune.load_data(args)


def test_a_missing_package_is_asked_for(flags, monkeypatch):
    args = parse(finetune.Config, [*flags, "--lora", "1"])
    for name, call in (("peft", finetune.make_model), ("transformers", finetune.load_data)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UsageError, match=f"needs `pip install {name}`"):
            call(args)


def test_a_model_is_trained_as_from_pretrained_returns_it_but_not_once_it_is_put_to_rest(
    run_main, flags, tmp_path, monkeypatch
):
    make, modes = finetune.make_model, []
    monkeypatch.setattr(finetune, "make_model", lambda args: make(args).eval())

    def rest(model: Any, *_: Any) -> None:
        modes.extend(layer.training for layer in model.modules())
        model.eval()

    monkeypatch.setattr(finetune, "answer", rest)
    with pytest.raises(RuntimeError, match="a model is in evaluation mode"):
        run_main("examples.finetune", *flags, "--run-dir", tmp_path)
    assert modes and all(modes)
