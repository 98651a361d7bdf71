"""What files of conversations hold is learned once and as it will be asked, or is named."""

import json
from datetime import date

import pytest
import torch
from conftest import refused
from safetensors.torch import save_file
from tokenizers import processors

from examples import docstrings, finetune
from trainkit.config import parse
from trainkit.language import conversations, preferences, pretrained, templates

transformers = pytest.importorskip("transformers")

CHATML = """{% for m in messages %}<user>{{ m.role }}
{{ m.content }}{% for t in (m.tool_calls or []) %}{{ CALL }}{% endfor %}<end>{% endfor %}
{%- if add_generation_prompt %}<user>assistant
{% endif %}"""
AS_VALUES = CHATML.replace("CALL", "t.function.arguments | tojson")
AS_TEXT = CHATML.replace("CALL", "t.function.name + t.function.arguments")
AS_PYTHON = CHATML.replace("CALL", "t.function.arguments")
THINKS = AS_VALUES.replace("assistant\n{% endif", "assistant\n<think>{% endif")
DATED = "{{ strftime_now('%d %b %Y') }}" + AS_VALUES
DATED_LATER = "{% set day = 'on %Y-%m-%d' %}{% macro a() %}{{ strftime_now(day) }}{% endmacro %}"
DATED_LATER += "{{ a() }}" + AS_VALUES


def system(content: str) -> dict:
    return {"role": "system", "content": content}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def says(content: str, role: str = "assistant") -> dict:
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "base"
    docstrings.make_base(folder, ["say ok no"], docstrings.Config(layers=1, width=32))
    return folder


@pytest.fixture
def make(base, tmp_path):
    """Make the sets of rows, each written three times."""

    def call(*rows, template=AS_VALUES, single="", function=conversations.make_chat_sets, **more):
        tokenizer = transformers.AutoTokenizer.from_pretrained(base)
        tokenizer.chat_template = template
        tokenizer.add_special_tokens({"bos_token": "<assistant>"})
        if single:
            marks = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in single.split()]
            marks = [pair for pair in marks if pair[0] != "$A"]
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single=single, special_tokens=marks
            )
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, *rows, *rows]))
        return function(tokenizer, str(path), 200, **more)

    return call


PAIR = {"prompt": [user("say")], "completion": [says("ok")]}
ONCE = r"<user>user\nsay<end><user>assistant\n[[ok<end>]]"
KIND = r"<user>system\nbe<end>"
EARLIER = r"<user>user\na<end><user>assistant\nb<end>"


@pytest.mark.parametrize(
    "row, shown",
    [
        ({"completion": [user("say"), says("ok")]}, ONCE),
        ({"completion": [user("say \n"), says("ok")]}, ONCE.replace("say", r"say \n")),
        ({"completion": [system("be"), user("say"), says("ok")]}, KIND + ONCE),
        ({"completion": [user("a"), says("b"), user("say"), says("ok")]}, EARLIER + ONCE),
        (
            {
                "prompt": [user("a"), says("b"), user("say")],
                "completion": [user("say"), says("ok")],
            },
            EARLIER + ONCE,
        ),
        (
            {"prompt": [system("be"), user("say")], "completion": [user("say"), says("ok")]},
            KIND + ONCE,
        ),
        (
            {"completion": [says("ok"), user("say"), says("ok")]},
            ONCE + r"<user>user\nsay<end><user>assistant\n[[ok<end>]]",
        ),
    ],
    ids=str,
)
def test_a_prompt_that_its_answer_repeats_is_there_once(make, row, shown):
    assert make(PAIR | row).plan["first"] == shown
    if "system" in str(row) or "a" not in str(row):
        answers = row["completion"]
        pair = {"prompt": row.get("prompt", PAIR["prompt"]), "chosen": answers}
        pair["rejected"] = [*answers[:-1], says("no")]
        plan = make(pair, function=preferences.make_pairs).plan
        assert plan["chosen"].count("say") == shown.count("say")
        assert plan["rejected"] == plan["chosen"].replace("[[ok", "[[no")


@pytest.mark.parametrize(
    "row, message",
    [
        ({"completion": [user("other"), says("ok")]}, "line 1 of .* not those of its prompt"),
        (
            {"prompt": [system("a"), user("say")], "completion": [system("b"), *PAIR["prompt"]]},
            "line 1 of .* not those of its prompt",
        ),
    ],
)
def test_an_answer_with_another_prompt_is_refused(make, row, message):
    with refused(message):
        make(PAIR | row)


@pytest.mark.parametrize(
    "chosen, rejected",
    [
        ([user("a"), says("ok")], [user("b"), says("no")]),
        ([system("be"), user("a"), says("ok")], [user("a"), says("no")]),
    ],
)
def test_two_answers_with_different_prompts_are_refused(make, chosen, rejected):
    for more in ({}, {"prompt": "a"}):
        with refused(r"line 1 of .* prompt"):
            make({"chosen": chosen, "rejected": rejected} | more, function=preferences.make_pairs)


def test_a_pair_may_have_an_instruction_and_an_input(make):
    row = {"instruction": "say", "input": "it", "chosen": "ok", "rejected": "no"}
    plan = make(row, function=preferences.make_pairs).plan
    assert plan["chosen"] == ONCE.replace("say", r"say\n\nit")


@pytest.mark.parametrize(
    "template, marks, row, shown, special",
    [
        (None, "<assistant> $A", {"text": "<assistant>say"}, "<assistant>[[say<end>]]", "3 of 3"),
        (None, "<assistant> $A", {"text": "say"}, "<assistant>[[say<end>]]", ""),
        (None, "", {"text": "<assistant>say"}, "<assistant>[[say<end>]]", ""),
        (None, "", {"text": "say<end>\n"}, "say[[<end>]]", "3 of 3"),
        (
            None,
            "$A <end>",
            {"prompt": "say", "answer": "ok"},
            "say[[ok<end>]]",
            "which is left out",
        ),
        (None, "", {"prompt": "say", "answer": "ok<end>"}, "say[[ok<end>]]", "3 of 3"),
        (AS_VALUES, "", {"prompt": "say", "answer": "ok<end>"}, ONCE, "3 of 3"),
        (
            "<assistant>" + AS_VALUES,
            "",
            {"prompt": "<assistant>say", "answer": "ok"},
            f"<assistant>{ONCE}",
            "3 of 3",
        ),
    ],
)
def test_tokens_that_begin_and_end_a_text_are_there_once(
    make, template, marks, row, shown, special
):
    plan = make(row, template=template, single=marks).plan
    assert plan["first"] == shown
    assert special in plan.get("special", "") and bool(special) == ("special" in plan)


CALL = {"function": {"name": "run", "arguments": {"cmd": "ls"}}}


@pytest.mark.parametrize("template", [AS_VALUES, AS_TEXT, AS_PYTHON])
@pytest.mark.parametrize("times_encoded", [0, 1, 2])
def test_arguments_of_tools_are_written_as_json_by_templates_of_both_kinds(
    make, template, times_encoded
):
    arguments = {"cmd": "ls"}
    for _ in range(times_encoded):
        arguments = json.dumps(arguments)
    turn = says("") | {"tool_calls": [{"function": {"name": "run", "arguments": arguments}}]}
    first = make({"messages": [user("say"), turn]}, template=template).plan["first"]
    assert first.endswith('{"cmd": "ls"}<end>]]') and r"\"" not in first


def test_arguments_that_are_no_json_are_named_unless_the_template_writes_them_as_they_are(make):
    turn = says("") | {"tool_calls": [{"function": {"name": "run", "arguments": "ls -la"}}]}
    row = {"messages": [user("say"), turn]}
    assert make(row, template=AS_TEXT).plan["first"].endswith("[[runls -la<end>]]")
    with refused(r"line 1 .* not JSON, 'ls -la'"):
        make(row)


@pytest.mark.parametrize("role", ["model", "gpt", "bot", "Assistant", "chatgpt"])
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
def test_usual_names_of_an_assistant_are_read(make, role, keys):
    turns = [dict(zip(keys, turn, strict=True)) for turn in (("human", "say"), (role, "ok"))]
    assert make({"messages": turns}).plan["first"] == ONCE


@pytest.mark.parametrize(
    "turn, message",
    [
        (says("ok", "narrator"), "the role 'narrator': rename it to user"),
        ({"speaker": "bot", "text": "ok"}, "speaker, text: rename them to role and content"),
        (says("ok") | {"weight": 0.5}, "the weight 0.5: only 0 and 1"),
    ],
)
def test_a_turn_that_cannot_be_read_is_named(make, turn, message):
    with refused(f"line 1 of .* {message}"):
        make({"messages": [user("say"), turn]})


def test_an_answer_that_nothing_comes_before_is_learned_without_what_leads_to_it(make):
    """Its words may be in the text before it, and a call of a tool has none."""
    call = says("") | {"tool_calls": [CALL]}
    for turn, words in ((says("a"), "a"), (call, '{"cmd": "ls"}')):
        first = make({"messages": [turn, user("say"), says("ok")]}).plan["first"]
        assert first == rf"<user>assistant\n[[{words}<end>]]" + ONCE


def test_a_system_text_is_not_added_to_a_developer(make):
    turns = [says("a", "developer"), user("say"), says("ok")]
    assert "be" not in make({"system": "be", "messages": turns}).plan["first"]


@pytest.mark.parametrize("template, shown", [(DATED, "03 Feb 2020"), (DATED_LATER, "2020-02-03")])
def test_a_template_writes_the_day_of_the_first_start(make, tmp_path, template, shown):
    sets = make(PAIR, template=template, today=date(2020, 2, 3), prompts=["say"])
    assert shown in sets.plan["first"]
    assert sets.plan["date"].startswith("2020-02-03") and "date" not in make(PAIR).plan


def test_the_day_of_a_run_is_kept_from_its_start_before_there_is_a_checkpoint(tmp_path):
    flags = ["--run-dir", str(tmp_path)]

    def first_day(*more) -> date:
        return templates.first_day(parse(finetune.Config, [*flags, *more]))

    assert first_day("--resume", "auto") == date.today()
    (tmp_path / "run.json").write_text(json.dumps({"arguments": {"day": "2020-02-03"}}))
    for how in ("auto", "latest", f"{tmp_path}/checkpoints/step-0000000002"):
        assert first_day("--resume", how) == date(2020, 2, 3)
    assert first_day() == date.today()
    assert first_day("--resume", "auto", "--day", "2021-01-31") == date(2021, 1, 31)
    with refused(r"--day 31\.1\.2021 is not like 2026-01-31"):
        first_day("--day", "31.1.2021")


@pytest.mark.parametrize(
    "template, message",
    [
        (
            "{% for m in messages %}{{ 'x' + m.content[0].text }}{% endfor %}",
            "cannot write a text, Und",
        ),
        (
            "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
            "leaves out",
        ),
        ("{% for m in messages %}", "cannot write a text, TemplateSyntaxError"),
    ],
)
def test_a_template_that_does_not_write_texts_is_named_with_its_error(
    make, base, template, message
):
    with refused(f"chat template of {base} {message}.*chat_template.jinja"):
        make(PAIR, template=template)


def test_a_prompt_that_ends_as_no_training_does_is_in_the_plan_and_asks_for_the_sample_answer(make):
    sets = make(PAIR, template=THINKS)
    assert "generation prompt ends with '<think>'" in sets.plan["template"]
    assert "3 of 3 rows" in sets.plan["template"]
    tokenizer = make(PAIR, function=lambda tokenizer, *_: tokenizer)
    ((name, asked),) = sets.prompts.items()
    assert name == "question: say\nanswer"
    assert tokenizer.decode(asked).endswith("assistant\n<think>")
    assert "template" not in make(PAIR).plan
    pairs = make(
        {"prompt": "say", "chosen": "ok", "rejected": "no"},
        template=THINKS,
        function=preferences.make_pairs,
    )
    assert "<think>" in pairs.plan["template"]


def test_a_token_without_a_row_in_the_embedding_is_named_and_rows_can_be_made(base, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<new>"]})
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    size = len(model.get_input_embeddings().weight)
    tokenizer.add_tokens([f"<{n}>" for n in range(size + 1 - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path)
    tokens = [torch.tensor([3, len(tokenizer) - 1])]
    with refused(rf"has {size} tokens and its tokenizer {size + 1}, .*--res"):
        pretrained.check_vocabulary(model, tokenizer, tokens)
    before = model.lm_head.weight.detach().clone()
    pretrained.resize_embeddings(model, str(tmp_path), is_frozen=False)
    pretrained.check_vocabulary(model, tokenizer, tokens)
    assert torch.equal(model.lm_head.weight[:size], before)
    torch.testing.assert_close(model.lm_head.weight[size], before.mean(0))
    with refused("leave --lora out"):
        pretrained.resize_embeddings(model, str(tmp_path), is_frozen=True)


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
    assert pretrained.dtype_of(str(tmp_path / "base")) == torch.bfloat16
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


WRITTEN = "<user>user\nsay<end><user>assistant\n"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": WRITTEN, "completion": "ok<end>"},
        {"prompt": WRITTEN, "completion": "ok"},
        {"messages": [user(WRITTEN), says("ok")]},
    ],
)
def test_a_prompt_that_is_written_in_the_chat_template_is_used_as_it_is(make, row):
    sets = make(row)
    assert sets.plan["first"] == make(PAIR).plan["first"]
    assert sets.plan["written"].startswith("3 of 3 rows have a prompt that is already written")
    asked = make(PAIR, prompts=[WRITTEN, "say"]).prompts
    assert asked[WRITTEN] == asked["say"] == next(iter(sets.prompts.values()))
    with refused("line 1 of .* already written in the chat template, .*no room for a system turn"):
        make(row | {"system": "be"})


def test_special_tokens_inside_of_texts_stay_text_and_are_counted(make):
    forged = user("say<end><user>assistant\nno<end><user>user\nok")
    row = {"messages": [forged, says("no <end> ok")]}
    sets = make(row, PAIR)
    assert sets.plan["inside"].startswith("3 of 6 rows have special tokens inside")
    samples = [*sets.train_set, *sets.eval_set]
    assert [(tokens == sets.end).sum() for tokens, _ in samples] == [2] * 6
    assert sorted((learned & (tokens == sets.end)).sum().item() for tokens, learned in samples) == (
        [1] * 6
    )
    half = {"prompt": "<user>user\nsay", "completion": "ok"}  # not whole: no answer begins there
    assert "inside" in make(half).plan and "written" not in make(half).plan


def test_what_changes_nothing_is_named(make):
    turn = says("ok") | {"rating": 0, "thinking": "so", "train_on_turn": False, "name": None}
    row = {"messages": [user("say"), turn], "id": 7, "parallel_tool_calls": False, "notes": ""}
    plan = make(row | {"tools": []}).plan
    assert plan["not read"] == "id, parallel_tool_calls; of turns: rating, thinking, train_on_turn"
    assert "not read" not in make(PAIR).plan
    named = make(row, template=AS_VALUES.replace("m.role", "m.role + (m.thinking or '')")).plan
    assert "thinking" not in named["not read"] and "userassistantso" not in named["first"]
    pair = {"prompt": "say", "chosen": "ok", "rejected": "no", "score": 0.5}
    assert make(pair, function=preferences.make_pairs).plan["not read"] == "score"


def test_refusals_thoughts_functions_and_parts_are_read(make):
    refusal = {"role": "assistant", "content": None, "refusal": "no"}
    assert make({"messages": [user("say"), refusal]}).plan["first"].endswith("[[no<end>]]")
    parts = [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "ok"}]
    thinks = AS_VALUES.replace("m.content", "(m.reasoning_content or '') + m.content")
    row = {"messages": [user("say"), says(parts)], "system": [{"type": "text", "text": "be"}]}
    assert make(row, template=thinks).plan["first"] == KIND + ONCE.replace("ok", "sook")
    assert "of 3 rows" in make(row).plan["template"]  # which leaves out what was thought
    tools = "{{ tools | map(attribute='function.name') | join }}" + AS_VALUES
    called = [{"name": "weather", "parameters": {}}]
    assert make(PAIR | {"functions": called}, template=tools).plan["first"].startswith("weather")
    with refused("line 1 of .*: its system is no text, but 5"):
        make(PAIR | {"system": 5})
    with refused("line 1 of .*: a turn holds image_url"):
        make(PAIR | {"system": [{"type": "image_url"}]})


def test_that_nothing_is_learned_because_of_weights_is_said(make):
    with refused("nothing is learned of 3 of 3 rows: .* whose weight is not 0"):
        make({"messages": [user("say"), says("ok") | {"weight": 0}]})
