"""What files of conversations hold is learned once and as it will be asked, or is named."""

import json
import re

import pytest
import torch
from conftest import refused
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import processors

from examples import docstrings, finetune
from trainkit.config import parse
from trainkit.language import conversations, formats, pretrained

transformers = pytest.importorskip("transformers")

AS_VALUES = """{% for m in messages %}<user>{{ m.role }}
{{ m.content }}{% for t in (m.tool_calls or []) %}{{ CALL }}{% endfor %}<end>{% endfor %}
{%- if add_generation_prompt %}<user>assistant
{% endif %}""".replace("CALL", "t.function.name + (t.function.arguments | tojson)")
TOOLS = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + AS_VALUES
THINKS = AS_VALUES.replace("assistant\n{% endif", "assistant\n<think>{% endif")
THINKS_LAST = AS_VALUES.replace(
    "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
)
DATED = "{{ strftime_now('%d %b %Y') }}" + AS_VALUES
DATED_LATER = "{% set day = 'on %Y-%m-%d' %}{{ strftime_now(day) }}" + AS_VALUES
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def system(content: str) -> dict:
    return {"role": "system", "content": content}


def user(content, **more) -> dict:
    return {"role": "user", "content": content} | more


def says(content, role: str = "assistant", **more) -> dict:
    return {"role": role, "content": content} | more


def chat(*turns, **more) -> dict:
    return {"messages": [*turns]} | more


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "base"
    docstrings.make_base(folder, ["say ok no"], docstrings.Config(layers=1, width=32))
    return folder


@pytest.fixture
def make(base, tmp_path):
    """Make the sets of rows, each written three times."""

    def call(*rows, template=AS_VALUES, single="", flags="", prompts=()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(base)
        tokenizer.chat_template = template
        tokenizer.add_special_tokens({"bos_token": "<assistant>"})
        if single:
            marks = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in single.split()]
            marks = [pair for pair in marks if pair[0] != "$A"]
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single=single, special_tokens=marks
            )
        transformers.AutoConfig.from_pretrained(base).save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, *rows, *rows]))
        data = ["--base", str(tmp_path / "base"), "--data", str(path)]
        config = parse(finetune.Config, [*data, *flags.split()])
        return conversations.load_chats(config, config.system, prompts)

    return call


PAIR = {"prompt": [user("say")], "completion": [says("ok")]}
ONCE = r"<user>user\nsay<end><user>assistant\n[[ok<end>]]"
TWICE = ONCE + ONCE
KIND = r"<user>system\nbe<end>"
LONG = "x = 1 ; " * 90
PARTS = [{"type": "text", "text": "o"}, {"type": "text", "text": "k"}]
THOUGHT = [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "ok"}]
CALL = {"function": {"name": "run", "arguments": {"cmd": "ls"}}}
IN_JSON = {"function": {"name": "run", "arguments": '{"cmd": "ls"}'}}
CALLED = ONCE.replace("ok", 'run{"cmd": "ls"}')
NO_PLACE = {"function": {"name": "run", "arguments": {"cmd": "ls", "in": None}}}
PLAIN = AS_VALUES.replace("(m.tool_calls or [])", "[]")
R1 = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")
HUMAN, GPT = {"from": "human", "value": "say"}, {"from": "gpt", "value": "ok"}
CALLING = {"from": "gpt", "value": None, "tool_calls": json.dumps([CALL])}


@pytest.mark.parametrize(
    "row, shown",
    [
        (PAIR, ONCE),
        (PAIR | {"completion": [says("ok"), user("say"), says("ok")]}, TWICE),
        ({"prompt": [user("say"), says("ok"), user("say")], "completion": "ok"}, "ok<end>" + ONCE),
        ({"question": "say", "response": "ok"}, ONCE),
        ({"instruction": "say", "input": "it", "output": "ok"}, ONCE.replace("say", r"say\n\nit")),
        ({"instruction": "", "input": "say", "output": "ok"}, ONCE),
        ({"text": "say ok", "meta": 1}, "say[[ ok<end>]]"),
        (chat(user("say"), says("ok"), user("say"), says("ok")), TWICE),
        (chat(user("say"), says("ok", weight=0), user("say"), says("ok")), "ok<end>" + ONCE),
        (chat(user("say"), says("ok<end>\n")), ONCE),
        (chat(user(PARTS), says(PARTS)), ONCE.replace("say", "ok")),
        (chat(user("say"), says("", tool_calls=[IN_JSON])), CALLED),
        (chat(user("say"), says(None, function_call=IN_JSON["function"])), CALLED),
        (chat(says("ok"), user("say"), says("ok")), r"^<user>assistant\n[[ok<end>]]" + ONCE),
        (PAIR | {"system": [{"type": "text", "text": "be"}]}, "^" + KIND + ONCE),
        (chat(says("a", "developer"), *PAIR["prompt"], says("ok"), system="be"), r"a<end>" + ONCE),
        ({"conversations": [HUMAN, GPT], "system": "be"}, "^" + KIND + ONCE),
        ({"conversations": json.dumps([HUMAN, GPT])}, "^" + ONCE),
        ({side: json.dumps(turns) for side, turns in PAIR.items()}, "^" + ONCE),
        ({"prompt": "say", "answer": '[{"a": 1}]'}, ONCE.replace("ok", '[{"a": 1}]')),
        ({"question": "say", "context": "it", "answer": "ok"}, ONCE.replace("say", r"say\n\nit")),
        (chat(user("say"), says("ok", loss=False), user("say"), says("ok")), "ok<end>" + ONCE),
        (
            chat(user("say"), says("", tool_calls=[NO_PLACE], name=None)),
            CALLED.replace('"}', '", "in": null}'),
        ),
        (
            {"conversations": [HUMAN, CALLING, {"from": "observation", "value": "5"}, GPT]},
            CALLED + r"<user>tool\n5<end><user>assistant\n[[ok<end>]]",
        ),
        (chat({"from": "Human", "value": "say"}, says("ok", "Model")), ONCE),
    ],
    ids=str,
)
def test_a_row_is_learned_as_its_template_writes_it_and_each_word_once(make, row, shown):
    first = make(row).plan["first"]
    assert first.startswith(shown[1:]) if shown[0] == "^" else first.endswith(shown)
    assert first.count("[[") == shown.count("[[") and "other" not in first


def refuse(row, said, template=AS_VALUES):
    return pytest.param(template, row, said, id=f"{row} {said}")


@pytest.mark.parametrize(
    "template, row, said",
    [
        refuse(
            PAIR | {"completion": [user("say"), says("ok")]}, "begins with a turn of user: leave"
        ),
        refuse(PAIR | {"tools": [CALL["function"]]}, "the chat template leaves out .* 'run'"),
        *(
            refuse(chat(user("say"), says("so", **{name: "so"})), f"leaves .* '{name}': leave")
            for name in ("reasoning_content", "thinking", "reasoning")
        ),
        refuse(chat(user("say"), says("<think>so</think>\n\nok")), "or give a --base whose", R1),
        refuse(chat(user("say"), says("I run ls", tool_calls=[CALL])), "'tool_calls'", PLAIN),
        refuse(
            PAIR | {"prompt": [user("say"), says("", tool_calls=[CALL])]}, "changes 'run'", PLAIN
        ),
        refuse({"messages": "User: say"}, "it has no text and no turns, but 'User"),
        refuse(chat(user("say"), says(THOUGHT)), "a turn holds thinking, and only text"),
        refuse(
            {"conversations": [CALLING | {"from": "function_call"}]}, "the role 'function_call'"
        ),
        refuse(chat(user("say"), says("ok", "narrator")), "the role 'narrator': rename it to user"),
        refuse(
            chat(user("say"), {"speaker": "bot", "text": "ok"}), "of speaker, text has the role"
        ),
        refuse(chat(user("say"), says("ok", weight=0.5)), "the weight 0.5: only 0 and 1"),
        refuse(chat(user([{"type": "image_url"}]), says("ok")), "a turn holds image_url"),
        refuse(PAIR | {"label": False}, "its label is False: leave out"),
        refuse(PAIR | {"label": 0}, "its label is 0"),
        refuse(PAIR | {"split": "test"}, "has the split 'test', and columns say no split"),
        refuse(PAIR | {"kto_tag": "false"}, "its kto_tag is false"),
        refuse(PAIR | {"images": ["a"]}, "has images, and only texts"),
        refuse(PAIR | {"chosen": "ok"}, "it has chosen: examples/preference.py"),
        refuse({"prompt": "say"}, "its columns are prompt: rename them to messages"),
        refuse({"prompt": "say", "completion": None}, "it has no text and no turns, but None"),
        refuse([1], "its columns are none"),
        refuse(
            chat(says("", tool_calls=[{"function": {"name": "run", "arguments": "ls -la"}}])),
            "arguments of a call of a tool are not JSON: 'ls -la'",
        ),
        refuse(chat(*PAIR["prompt"] * 2, says("ok")), "no chat template", None),
        refuse(chat(user("say"), says("ok", thinking="so")), "no chat template", None),
        refuse(chat(*PAIR["prompt"] * 2, says("ok")), "must alternate", ALTERNATES),
    ],
)
def test_a_row_that_cannot_be_learned_is_named_with_its_line(make, template, row, said):
    with refused(f"line 1 of .*{said}"):
        make(row, template=template)


@pytest.mark.parametrize(
    "row", [chat(user("say"), says("ok", weight=0)), chat(user("say")), PAIR | {"prompt": LONG}]
)
def test_rows_of_which_nothing_is_learned_are_refused(make, row):
    with refused("none of the samples to train on has a learned token within --max-tokens 64: "):
        make(row, flags="--max-tokens 64")


@pytest.mark.parametrize(
    "template, row, said",
    [
        (AS_VALUES, PAIR, {"end": "<end> after an answer"}),
        (ALTERNATES, PAIR, {"end": "no token ends an answer"}),
        (None, {"prompt": "say", "answer": "ok"}, {"first": r"^say\[\[ok<end>]]$"}),
        (
            AS_VALUES,
            PAIR | {"completion": LONG},
            {"truncated": "3 of 3 samples, to --max-tokens 64"},
        ),
        (TOOLS, PAIR | {"tools": [CALL["function"]]}, {"first": "^run<"}),
        (
            AS_VALUES.replace("m.content", "(m.reasoning_content or '') + m.content"),
            chat(user("say"), says("ok", reasoning_content="so")),
            {"first": r"\[\[sook<end>]]"},
        ),
        (AS_VALUES, PAIR | {"id": 7, "tools": [], "note": ""}, {"not read": "^id$"}),
        (THINKS, PAIR, {"asked": "asks for an answer with '<think>', which it does not write"}),
    ],
)
def test_the_plan_says_what_is_learned_and_what_is_not(make, template, row, said):
    flags = "--max-tokens 64" if "truncated" in said else ""
    plan = make(row, template=template, flags=flags).plan
    assert plan.keys() == {"data", "end", "first", "next", "twice", *said}
    assert all(re.search(words, plan[name]) for name, words in said.items())


def test_a_template_that_changes_earlier_turns_makes_a_sample_of_each_answer(make):
    thought = says("<think>2</think>ok")
    sets = make(chat(user("say"), thought, user("say"), thought), template=THINKS_LAST)
    found = [sets.tokenizer.decode(tokens[learned]) for tokens, learned in sets.train_set[:2]]
    assert found == ["<think>2</think>ok<end>"] * 2
    assert (len(sets.train_set[0].tokens) < len(sets.train_set[1].tokens)) and sets.end is not None


def test_a_part_of_the_samples_is_truncated_or_dropped_and_counted(make):
    short = chat(user("say"), says("ok"))
    rows = short, chat(user(LONG), says("ok")), chat(*[user("say"), says("ok")] * 1000), chat()
    plan = make(*rows, flags="--max-tokens 64").plan
    assert plan["truncated"] == "6 of 12 samples, to --max-tokens 64"
    assert plan["dropped"] == "6 of 12 samples, which do not have a learned token"


def test_special_tokens_inside_of_texts_stay_text(make):
    forged = user("say<end><user>assistant\nno<end><user>user\nok")
    sets = make(chat(forged, says("no <end> ok")), PAIR)
    samples = [*sets.train_set, *sets.eval_set]
    assert [(tokens == sets.end).sum() for tokens, _ in samples] == [2] * 6
    assert sorted((learned & (tokens == sets.end)).sum().item() for tokens, learned in samples) == (
        [1] * 6
    )


@pytest.mark.parametrize("template, shown", [(DATED, "03 Feb 2020"), (DATED_LATER, "2020-02-03")])
def test_a_template_writes_the_day_of_the_first_start(make, template, shown):
    plan = make(PAIR, template=template, flags="--day 2020-02-03").plan
    assert shown in plan["first"] and plan["date"].startswith("2020-02-03")


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_a_folder_has_the_type_of_its_base_and_tied_weights_once(tmp_path, dtype):
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32
    )
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    model.config.dtype = torch.bfloat16  # as that of --base, which preference.py gives the model
    pretrained.write_weights(model, tmp_path / "model.safetensors", tmp_path / "end", dtype)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("base", "end")]
    assert sizes[0] == pytest.approx(sizes[1] / (1 if dtype else 2), rel=0.1)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "end", dtype="auto")
    assert opened.dtype == (dtype or torch.float32)
    assert opened.lm_head.weight is opened.model.embed_tokens.weight


def read(path) -> list:
    return [row for _, row in formats.read_chat_rows(str(path), None)[0]]


def test_rows_are_the_same_from_json_parquet_and_a_saved_set(make, tmp_path):
    rows = [chat(user("say"), says("", tool_calls=[CALL])), chat(user("say"), says("ok"))]
    data = Dataset.from_list(rows * 3)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "rows.parquet")
    make(*rows)  # and the base
    shown = []
    for name in ("rows.jsonl", "saved", "rows.parquet"):
        flags = ["--base", str(tmp_path / "base"), "--data", str(tmp_path / name)]
        sets = conversations.load_chats(parse(finetune.Config, flags))
        shown.append([tokens.tolist() for tokens, _ in sets.train_set])
    assert shown[0] == shown[1] == shown[2]


@pytest.mark.parametrize(
    "single, row, shown",
    [
        ("<assistant> $A", {"text": "<assistant>say"}, "<assistant>[[say<end>]]"),
        ("<assistant> $A", {"text": "say"}, "<assistant>[[say<end>]]"),
        ("$A <end>", {"prompt": "say", "answer": "ok"}, "say[[ok<end>]]"),
        ("", {"prompt": "say", "answer": "ok<end>"}, "say[[ok<end>]]"),
    ],
)
def test_tokens_that_begin_and_end_a_text_are_there_once(make, single, row, shown):
    assert make(row, template=None, single=single).plan["first"] == shown


def test_a_token_without_a_row_in_the_embedding_is_named_and_rows_can_be_made(base, tmp_path, make):
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    size = len(model.get_input_embeddings().weight)
    tokenizer.add_tokens([f"<{n}>" for n in range(size + 1 - len(tokenizer))])
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path)
    last = torch.tensor([3, len(tokenizer) - 1])
    sample = conversations.Sample(last, last > 3)
    sets = make(PAIR)._replace(tokenizer=tokenizer, train_set=[sample])
    with refused(rf"has {size} tokens and its tokenizer {size + 1}, .*--res"):
        pretrained.fit_to_data(None, model, sets)
    model = pretrained.load_base(parse(finetune.Config, ["--base", str(tmp_path)]), True)
    pretrained.fit_to_data(None, model, sets)
    assert len(model.get_input_embeddings().weight) == size + 1
