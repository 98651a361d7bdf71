"""Turn conversations into tokens: which are learned, which are cut off, and what ends an answer."""

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch

from trainkit.errors import UsageError, as_usage_error
from trainkit.text import first_sentence, shorten

Sample = tuple[torch.Tensor, torch.Tensor]  # tokens, int64 (length,), and which are learned, bool
# The columns of each format that is read. A row has the first format whose columns are all there.
FORMATS = [
    "messages",
    "conversations",
    "prompt and completion",
    "prompt and answer",
    "prompt and response",
    "question and answer",
    "question and response",
    "instruction and output",
    "instruction and response",
    "text",
]
# Columns without which the text of a row would mean something else.
NOT_READ = ("image", "images", "video", "videos", "audio", "audios", "history")
WEIGHTS = ("weight", "loss_weight", "train")  # of a turn: OpenAI's, LLaMA-Factory's and Axolotl's
# Who speaks in files in the format of ShareGPT, whose turns have `from` and `value`.
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
MOST_SHOWN = 400  # characters of a sample


class Conversation(NamedTuple):
    """The turns of a conversation, as chat templates take them, or one text.

    Attributes:
        turns: role and content, both texts, and the tool_calls of a turn, as transformers has them.
        num_given: the number of turns at the start that are a prompt; no answer in it is learned.
        tools: descriptions of tools for the template.
        text: used instead of turns; all of it is learned.
    """

    turns: list[dict[str, Any]]
    num_given: int = 0
    tools: Sequence[Any] = ()
    text: str | None = None


def read_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row and its place.

    source: a JSON lines, JSON or Parquet file, a folder that `datasets` can load, or a Hub id.
    Raises a UsageError that names the line if a line is not JSON.
    """
    path = Path(source)
    if path.suffix == ".parquet" and path.is_file():
        rows = pq.read_table(path).to_pylist()
    elif path.is_file():
        data = path.read_bytes()
        rows = _read_json(data) if path.suffix == ".json" else None
        if rows is None:
            for number, line in enumerate(data.splitlines(), 1):
                place = f"line {number} of {path}"
                with as_usage_error(f"{place} is not JSON, and only JSON and Parquet are read"):
                    row = json.loads(line)
                yield place, row
            return
    else:
        import datasets

        saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
        rows = datasets.load_from_disk(path) if saved else datasets.load_dataset(source)
        rows = rows["train"] if isinstance(rows, dict) else rows
    for number, row in enumerate(rows, 1):
        yield f"row {number} of {source}", row


def _read_json(data: bytes) -> list[Any] | None:
    """Return the rows of a file that is a list, or one row; None if each line is a value."""
    try:
        rows = json.loads(data)
    except json.JSONDecodeError as problem:
        if problem.msg != "Extra data":
            raise
        return None
    return rows if isinstance(rows, list) else [rows]


def read_conversations(source: str) -> tuple[list[tuple[str, Conversation]], str]:
    """Return the conversations of read_rows, each with its place, and the columns they come from.

    Raises a UsageError that names the first row that lacks such columns, or has no texts in them.
    """
    found: list[tuple[str, Conversation]] = []
    kinds: dict[str, None] = {}
    for place, row in read_rows(source):
        held = {*row} if isinstance(row, dict) else set()
        names = next((each for each in FORMATS if held.issuperset(each.split(" and "))), None)
        if names is None:
            raise UsageError(
                f"{place} has no columns of a known format, but "
                f"{shorten(sorted(held)) or 'none'}: rename them to one of {'; '.join(FORMATS)}"
            )
        with named(place, f"text, or no turns, in {names}"):
            found.append((place, _conversation(names.split(" and "), row)))
        kinds[names] = None
    return found, "; ".join(kinds)


@contextlib.contextmanager
def named(place: str, lacks: str) -> Iterator[None]:
    """Raise a UsageError that names the place if a row cannot be read, or lacks something."""
    try:
        yield
    except UsageError as problem:
        raise UsageError(f"{place}: {problem}") from problem
    except (TypeError, KeyError, AttributeError, ValueError) as problem:
        raise UsageError(f"{place} has no {lacks}") from problem


def _conversation(columns: list[str], row: dict[str, Any]) -> Conversation:
    """Make a conversation of a row that has the columns of one of the FORMATS."""
    if row.get("chosen"):
        raise UsageError("it has chosen: examples/preference.py learns from pairs of answers")
    if row.get("label") is False:
        raise UsageError("its label is false: leave out what is not wanted as an answer")
    if columns == ["text"]:
        return in_context([], 0, row)._replace(text=row["text"] + "")
    given, said = ([], row[columns[0]]) if len(columns) == 1 else (row[name] for name in columns)
    if more := "instruction" in columns and (row.get("input") or row.get("context")):
        given = given + "\n\n" * (given != "") + more
    given, said = as_turns(given, "user"), as_turns(said, "assistant")
    return in_context(given + said, len(given), row)


def in_context(turns: list[dict[str, Any]], num_given: int, row: dict[str, Any]) -> Conversation:
    """Return the conversation with the tools and the system turn that its row has.

    Raises UsageError for a row that has something that is not read.
    """
    if missed := [name for name in NOT_READ if row.get(name)]:
        raise UsageError(f"it has {missed[0]}, and only texts and turns are read: leave it out")
    conversation = Conversation(turns, num_given, _functions(row.get("tools") or []))
    return with_system(conversation, row.get("system") or row.get("system_prompt"))


def as_turns(value: Any, role: str) -> list[dict[str, Any]]:
    """Return turns as templates take them: of a list, of one turn, or of a text that `role` says.

    Raises TypeError, KeyError, AttributeError or ValueError for others, UsageError for a picture.
    """
    value = {"role": role, "content": value} if isinstance(value, str) else value
    return [_as_turn(turn) for turn in ([value] if isinstance(value, dict) else value)]


def _as_turn(turn: dict[str, Any]) -> dict[str, Any]:
    if "from" in turn:
        role, value = turn["from"], turn["value"]
        turn = {"role": ROLES.get(role, role), "content": value}
        if role == "function_call":
            turn = {"role": "assistant", "tool_calls": value}
    calls = _functions(turn.get("tool_calls") or [])
    content = turn.get("content") or "" if calls else turn["content"]
    if isinstance(content, list):  # most templates would write it as Python does
        if others := [part["type"] for part in content if part["type"] != "text"]:
            raise UsageError(f"a turn holds {others[0]}, and only text can be learned from")
        content = "".join(part["text"] if "text" in part else part["value"] for part in content)
    if not isinstance(turn["role"], str) or not isinstance(content, str):
        raise TypeError
    return _filled(turn) | {"content": content} | ({"tool_calls": calls} if calls else {})


def _functions(values: Any) -> list[dict[str, Any]]:
    """Return tools, or calls of tools, as transformers has them, also if they are given as JSON."""
    values = json.loads(values) if isinstance(values, str) else _filled(values)
    found = []
    for value in values if isinstance(values, list) else [values]:
        function = value.get("function", value)
        if isinstance(function.get("arguments"), str):  # most templates would quote it once more
            function = function | {"arguments": json.loads(function["arguments"] or "{}")}
        found.append({"type": "function", "function": function})
    return found


def _filled(value: Any) -> Any:
    """Remove the nulls that a table holds for fields that only other rows have."""
    if isinstance(value, dict):
        return {name: _filled(each) for name, each in value.items() if each is not None}
    return [_filled(each) for each in value] if isinstance(value, list) else value


def find_end(tokenizer: Any, has_turns: bool = True) -> int | None:
    """Return the token that ends an answer, by the chat template if there is one; None: no token.

    Raises UsageError if the template leaves out what is said.
    """
    if not tokenizer.chat_template or not has_turns:
        return tokenizer.eos_token_id
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    _, found, after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("answer")
    if not found:
        raise UsageError("the chat template of the model leaves out plain text")
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    tokens = tokenizer(after, add_special_tokens=False).input_ids
    return next((token for token in tokens if token in special), None)


def read_base(base: str) -> tuple[Any, int | None]:
    """Return the tokenizer of a folder or Hub id, and how many tokens its model takes at once."""
    with as_usage_error("this example needs `pip install transformers`"):
        from transformers import AutoConfig, AutoTokenizer
    with as_usage_error(f"--base {base} cannot be read"):
        limit = num_positions(AutoConfig.from_pretrained(base))
        return AutoTokenizer.from_pretrained(base), limit


def num_positions(config: Any) -> int | None:
    """Return how many tokens a transformers model takes at once; None: its config sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def without_dropout(config: Any) -> Any:
    """Set all probabilities of dropout in the config of a transformers model to 0; return it."""
    for part in (config, config.get_text_config()):
        values = part.to_dict().items()
        part.update({n: 0.0 for n, value in values if "drop" in n and isinstance(value, float)})
    return config


def find_limit(max_tokens: int, positions: int | None) -> tuple[int, str]:
    """Return how many tokens of a sample are kept, and what says so."""
    size = min(max_tokens, positions or max_tokens)
    return size, f"--max-tokens {size}" if size == max_tokens else f"the model's {size} positions"


def check_left(sets: Sequence[Sequence], num_rows: int, what: str, why: str) -> None:
    """Raise UsageError if nothing of these rows is left to train or to evaluate on."""
    if num_rows > 1 and not all(sets):
        what = what.format("evaluate" if sets[0] else "train")
        larger = " or give a larger --max-tokens" * why.startswith("-")
        raise UsageError(f"none of the {what} within {why}: shorten the prompts{larger}")


def encode(tokenizer: Any, conversation: Conversation, size: int) -> tuple[list[Sample], str]:
    """Return samples in which the assistant's words are learned, and the first part that they lack.

    That is "" unless the template leaves out or changes something. There is one sample, or one for
    each answer if the template changes earlier turns when others follow them, as some do with
    the text between <think> and </think>; this way nothing of a turn is lost. Answers that begin
    after `size` tokens may be left out. Raises ValueError if answers cannot be told apart.
    """
    turns, end = conversation.turns, tokenizer.eos_token or ""
    if conversation.text is not None:
        return [_sample(tokenizer(conversation.text + end).input_ids, [])], ""
    if not tokenizer.chat_template:
        if [turn["role"] for turn in turns] != ["user", "assistant"]:
            raise ValueError("it has turns, and the tokenizer of --base has no chat template")
        ask = ask_tokens(tokenizer, turns[0]["content"])
        answer = tokenizer(turns[1]["content"] + end, add_special_tokens=False).input_ids
        return [_sample(ask + answer, [(len(ask), len(ask + answer))])], ""
    pieces: list[list[int]] = []
    spans: list[tuple[int, int]] = []
    lost = ""
    for number in range(conversation.num_given, len(turns)):
        if _is_learned(turns[number]) and not (pieces and len(pieces[-1]) > size):
            tokens, span, missing = _encode_turn(tokenizer, conversation, number)
            pieces, spans, lost = [*pieces, tokens], [*spans, span], lost or missing
    if pieces and all(pieces[-1][: len(tokens)] == tokens for tokens in pieces):
        return [_sample(pieces[-1], spans)], lost
    return [_sample(*piece) for piece in zip(pieces, ([span] for span in spans), strict=True)], lost


def _is_learned(turn: dict[str, Any]) -> bool:
    """Return whether an assistant says this, and its weight, by which sets mark turns, is not 0."""
    return turn["role"] == "assistant" and all(turn.get(name, 1) != 0 for name in WEIGHTS)


def ask_tokens(tokenizer: Any, prompt: str, system: str | None = None) -> list[int]:
    """Return the tokens up to where the answer to a prompt begins."""
    if tokenizer.chat_template:
        turns = with_system(Conversation([{"role": "user", "content": prompt}]), system).turns
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return tokenizer(text, add_special_tokens=False).input_ids
    # A token is predicted from those before it, so the first one of an answer needs one too.
    start = tokenizer.bos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return tokenizer(prompt).input_ids or [start] * (start is not None)


def with_system(conversation: Conversation, system: str | None) -> Conversation:
    """Return the conversation with this text as a system turn, if it has turns and none of it."""
    turns, num_given = conversation.turns, conversation.num_given
    if not system or not turns or turns[0]["role"] == "system":
        return conversation
    turns = [{"role": "system", "content": system}, *turns]
    return conversation._replace(turns=turns, num_given=num_given + 1)


def _encode_turn(
    tokenizer: Any, conversation: Conversation, number: int
) -> tuple[list[int], tuple[int, int], str]:
    """Return the tokens up to a turn's end, the turn's span, and what the template left out."""
    turns, how = conversation.turns, {"tools": conversation.tools or None, "tokenize": False}
    given, said = turns[:number], turns[number]
    text = tokenizer.apply_chat_template([*given, said], **how)
    ask = text[: text.find(said["content"])]  # used if no turn comes before the answer
    if given:
        ask = tokenizer.apply_chat_template(given, add_generation_prompt=True, **how)
    same, asked = text[: _num_equal(ask, text)], given[-1]["content"] if given else ""
    # Some templates write the end of a prompt differently if an answer follows it.
    if not _missing(ask, asked) and _missing(same, asked):
        raise ValueError("the chat template changes the turn before an answer with the answer")
    before, tokens = tokenizer([ask, text], add_special_tokens=False).input_ids
    tools, calls = (
        [each["function"].get("name", "") for each in functions]
        for functions in (conversation.tools, said.get("tool_calls", ()))
    )
    # Templates may leave out what was thought earlier, and write what tools return in other ways.
    parts = [turn["content"] for turn in given if turn["role"] not in ("assistant", "tool")]
    parts += [said["content"], said.get("reasoning_content", ""), *tools]
    lost = _missing(text, *parts) or _missing(text[len(same) :], *calls)
    return tokens, (_num_equal(before, tokens), len(tokens)), lost


def _num_equal(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items at the start of both are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


def _missing(text: str, *parts: str) -> str:
    """Return the first part that the text lacks, or "". Templates strip white space: ignored."""
    text = "".join(text.split())
    return next((part for part in parts if "".join(part.split()) not in text), "")


def _sample(tokens: list[int], spans: list[tuple[int, int]]) -> Sample:
    """Make a sample in which the spans are learned, or all of it if there are no spans.

    The first token is never learned, because there is no token before it.
    """
    learned = torch.full((len(tokens),), not spans)
    for start, stop in spans:
        learned[start:stop] = True
    learned[:1] = False
    return torch.tensor(tokens, dtype=torch.int64), learned


def show(tokenizer: Any, sample: Sample) -> str:
    """Return a sample as one line of text, with what is learned in double brackets."""
    shown = ""
    for learned, pairs in groupby(zip(*(x.tolist() for x in sample), strict=True), lambda x: x[1]):
        text = repr(tokenizer.decode([token for token, _ in pairs]))[1:-1]
        if len(text) > 150:
            text = f"{text[:80]} ... {text[-60:]}"
        shown += f"[[{text}]]" if learned else text
    return shown[:MOST_SHOWN] + " ..." * (len(shown) > MOST_SHOWN)


class Sets(NamedTuple):
    """What make_sets returns; pack_sets makes other samples of it."""

    train_set: Sequence[Any]  # of Sample
    eval_set: Sequence[Any]  # sorted by length, so that its batches have little padding
    end: int | None  # the token that ends an answer
    plan: dict[str, str]  # lines to print
    prompts: dict[str, list[int]]  # what to answer at an evaluation, by the name to print


def make_sets(
    tokenizer: Any,
    source: str,
    max_tokens: int,
    limit: int | None = None,
    system: str | None = None,
    prompts: Sequence[str] = (),
) -> Sets:
    """Make a training set and, from a tenth of the rows, an evaluation set, and describe both.

    Samples are cut to max_tokens, or to `limit` if that is less; samples with no learned token left
    are dropped and counted. `system` begins conversations without a system turn, and the prompts.
    Raises UsageError if one of the sets is left empty, or for a row that read_conversations or the
    chat template refuses, and names its place.
    """
    size, why = find_limit(max_tokens, limit)
    rows, columns = read_conversations(source)
    if system and not tokenizer.chat_template:
        raise UsageError("--system needs a chat template, and the tokenizer of --base has none")
    rows = [(place, with_system(row, system)) for place, row in rows]
    sets, said = _encode_all(tokenizer, rows, size, why)
    check_left(sets, len(rows), "samples to {} on has an answer, or a token of one", why)
    end = find_end(tokenizer, any(row.turns for _, row in rows))
    plan = {"data": f"{len(rows)} rows of {columns}", "end": _describe_end(tokenizer, end, sets)}
    plan |= said | ({"first": show(tokenizer, sets[0][0])} if sets[0] else {})
    ask = {prompt: ask_tokens(tokenizer, prompt, system) for prompt in prompts}
    if not ask and sets[1]:
        tokens, learned = sets[1][0]
        ask["answer"] = tokens[: int(learned.nonzero()[0])].tolist()
    return Sets(sets[0], sorted(sets[1], key=lambda sample: len(sample[0])), end, plan, ask)


def _encode_all(
    tokenizer: Any, rows: Sequence[tuple[str, Conversation]], size: int, why: str
) -> tuple[tuple[list[Sample], list[Sample]], dict[str, str]]:
    """Return the samples to train and evaluate on, and lines about what was left out of them."""
    sets: tuple[list[Sample], list[Sample]] = ([], [])
    num_cut = num_dropped = num_empty = 0
    changed = []
    for number, (place, conversation) in enumerate(rows):
        num_empty += _has_empty_answer(conversation)
        with as_usage_error(f"{place} cannot be tokenized"):
            samples, lost = encode(tokenizer, conversation, size)
        changed += [lost] * bool(lost)
        num_dropped += not samples
        for tokens, learned in samples:
            num_cut += len(tokens) > size
            is_left = bool(learned[:size].any())
            sets[number % 10 == 0].extend([(tokens[:size], learned[:size])] * is_left)
            num_dropped += not is_left
    num_samples = sum(map(len, sets)) + num_dropped
    said = {"cut": f"{num_cut} of {num_samples} samples, to {why}"} if num_cut else {}
    if num_dropped:
        said["dropped"] = (
            f"{num_dropped} of {num_samples} samples, which have no learned token left"
        )
    if num_empty:
        said["empty"] = (
            f"{num_empty} of {len(rows)} rows have an answer without text, which is learned: the "
            "model says nothing there"
        )
    if changed:
        said["template"] = (
            f"leaves out or changes parts of {len(changed)} of {len(rows)} rows, which are learned "
            f"without: the first is {changed[0][:30]!r}"
        )
    return sets, said


def _has_empty_answer(conversation: Conversation) -> bool:
    answers = conversation.turns[conversation.num_given :]
    said = [turn for turn in answers if _is_learned(turn) and not turn.get("tool_calls")]
    return not all(turn["content"].strip() for turn in said)


def _describe_end(tokenizer: Any, end: int | None, sets: tuple[list[Sample], list[Sample]]) -> str:
    if end is None:
        return "no token ends an answer: the model does not learn where to stop"
    ended = [end in tokens[learned].tolist() for samples in sets for tokens, learned in samples]
    name = tokenizer.convert_ids_to_tokens(end)
    return f"{name} after an answer, learned in {sum(ended)} of {len(ended)} samples"


def answer(model: Any, tokenizer: Any, prompt: list[int]) -> str:
    """Return the greedy answer to the tokens of a prompt. Every process must call this."""
    tokens = torch.tensor([prompt], device=model.device)
    num_new = min(50, (num_positions(model.config) or math.inf) - len(prompt))
    options = {"max_new_tokens": num_new, "do_sample": False}
    model.eval()
    try:
        found = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)
        return tokenizer.decode(found[0, len(prompt) :], skip_special_tokens=True)
    except Exception as problem:  # this is only shown: it must not end the run
        return f"none, because of {first_sentence(problem)}"
    finally:
        model.train()
