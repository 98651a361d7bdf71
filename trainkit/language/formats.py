"""Read conversations from files: which columns a row has, who speaks, how tools are called."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch

from trainkit.errors import UsageError, as_usage_error
from trainkit.reading import splits
from trainkit.reading.paths import is_read, read_here_or_from_hub, refuse_pipe
from trainkit.text import count, nfc, shorten

Turn = dict[str, Any]  # role and content, both texts, and perhaps tool_calls
Rows = Iterator[tuple[str, Any]]  # each with the place that a message names

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet")  # of files
# A row has the first of these pairs of columns, of a prompt and its answer. Without the name of a
# prompt there is a whole conversation, or a text.
FORMATS = (
    ("", "messages"),
    ("", "conversations"),
    ("prompt", "completion"),
    ("prompt", "answer"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("", "text"),
)
# Where a row of two answers may have its prompt. In such a row `messages` often is an answer.
PROMPTS = ("prompt", "question", "instruction", "conversations")
INPUTS = ("input", "context")  # the first that is not empty ends an instruction
# Columns without which the text of a row would mean something else.
NOT_READ = ("image", "images", "video", "videos", "audio", "audios", "history")
TOOLS, SYSTEM = ("tools", "functions"), ("system", "system_prompt")  # the first that is not empty
EMPTY: tuple[Any, ...] = (None, "", [], {})  # False and 0 are values
PARTS = ("text", "input_text", "output_text")  # of a content that is a list
TURN = ("from", "value", "tool_calls", "function_call")  # keys that become others
WEIGHTS = ("weight", "loss_weight", "train")  # of a turn: OpenAI's, LLaMA-Factory's and Axolotl's
# What files call those who speak, in small letters. ipython and function are names of templates.
ROLES = (
    dict.fromkeys(("user", "human", "prompter"), "user")
    | dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant")
    | dict.fromkeys(("tool", "observation", "tool_response", "function_response"), "tool")
    | {name: name for name in ("system", "developer", "ipython", "function")}
)
PREAMBLES = ("system", "developer")  # a conversation has one at most
OPENING = (*PREAMBLES, "user")  # an answer does not begin with these


class Conversation(NamedTuple):
    """The turns of a conversation, as chat templates take them, or one text.

    Attributes:
        turns: those of tool_calls have functions as transformers has them, with arguments that are
            values and no JSON.
        num_prompt: the number of turns at the start that are a prompt; no answer in it is learned.
        tools: descriptions of tools for the template.
        text: used instead of turns; all of it is learned.
        unread: the columns of its row that are not empty and were not read.
    """

    turns: list[Turn]
    num_prompt: int = 0
    tools: Sequence[Any] = ()
    text: str | None = None
    unread: tuple[str, ...] = ()


def read_chat_rows(
    data: str, eval_data: str | None
) -> tuple[list[tuple[str, Any]], int, dict[str, str]]:
    """Return the rows of --data, how many at their end are to be evaluated, and lines of the plan.

    Evaluated are the rows of --eval-data, or those of a test split; 0 if there is neither. Each row
    comes with its place. data: a file of JSON lines, JSON or Parquet, a folder of them or one that
    `datasets` can load, or a Hub id.
    """
    parts = _find_parts(data, f"--data {data}")
    found = splits.find_splits([*parts])
    names = {split: shorten(names) for split, names in found.items()}
    split, unread = splits.choose_evaluated(names, lambda _: True, bool(eval_data))
    given = [row for part in found[split] for row in parts[part]] if split else []
    name = names[split] if split else ""
    if eval_data:
        own = _find_parts(eval_data, f"--eval-data {eval_data}")
        sides = splits.find_splits([*own])
        chosen = next(sides[split] for split in (*splits.EVALUATED, "train") if split in sides)
        given = [row for part in chosen for row in own[part]]
        name = f"--eval-data {eval_data}" + (f", {shorten(chosen)}" if len(sides) > 1 else "")
    train = [row for part in found["train"] for row in parts[part]]
    if not given:
        _refuse_split_column(train)
    told = f"{name}: {count(len(given), 'row')}" if name else ""
    return train + given, len(given), splits.describe_given(told, unread)


def _refuse_split_column(rows: Iterable[tuple[str, Any]]) -> None:
    """Raise UsageError if a column called split says that rows are not to be trained on."""
    for where, row in rows:
        value = row.get("split") if isinstance(row, dict) else None
        if isinstance(value, str) and splits.find_split(value) in splits.EVALUATED:
            raise UsageError(
                f"{where} has the split {value!r}, and columns say no split: write these rows to a "
                "file of their own and give it as --eval-data"
            )


def _find_parts(data: str, where: str) -> dict[str, Rows]:
    """Return the rows of each file of a folder, or part of a data set, by its name.

    where: begins the sentence of a UsageError.
    """
    path = Path(data)
    if path.is_file():
        return {path.name: _read_file(path)}
    refuse_pipe(path, where)
    files = [file.relative_to(path).as_posix() for file in sorted(path.rglob("*"))]
    files = [file for file in files if is_read(file) and file.endswith(SUFFIXES)]
    is_saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    if files and not is_saved:
        return {file: _read_file(path / file) for file in files}
    with read_here_or_from_hub(data, where):
        import datasets

        loaded = datasets.load_from_disk(data) if is_saved else datasets.load_dataset(data)
    if not isinstance(loaded, dict):
        return {data: _number(loaded, data)}
    return {str(name): _number(rows, f"{data}, {name}") for name, rows in loaded.items()}


def _number(rows: Iterable[Any], place: str) -> Rows:
    for number, row in enumerate(rows, 1):
        yield f"row {number} of {place}", row


def _read_file(path: Path) -> Rows:
    """Yield the rows of a file. JSON is a list, a row, or has a row in each line.

    It is read as it is: `datasets` would make a date of the text 2026-01-31, and 1.0 of a 1 beside
    a 1.5.
    """
    if path.suffix == ".parquet":
        yield from _number(pq.read_table(path).to_pylist(), str(path))
        return
    with as_usage_error(f"{path} is not in UTF-8, as JSON must be"):
        text = path.read_text("utf-8-sig")
    with contextlib.suppress(json.JSONDecodeError):
        rows = json.loads(text)
        yield from _number(rows if isinstance(rows, list) else [rows], str(path))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            with as_usage_error(f"line {number} of {path} is not JSON"):
                row = json.loads(line)
            yield f"line {number} of {path}", row


def find_format(row: Any) -> tuple[str, str] | None:
    """Return the columns of the prompt, which may be "", and of the answer of a row."""
    own = {*row} if isinstance(row, dict) else set()
    return next((pair for pair in FORMATS if own.issuperset(filter(None, pair))), None)


def read_conversations(
    rows: Iterable[tuple[str, Any]],
) -> tuple[list[tuple[str, Conversation]], str]:
    """Return all conversations, each with its place, and the columns they come from.

    Raises a UsageError that names the first row that lacks such columns, or has no texts in them.
    """
    conversations: list[tuple[str, Conversation]] = []
    formats: dict[str, None] = {}
    for where, row in rows:
        columns = find_format(row)
        if not columns:
            own = sorted(row) if isinstance(row, dict) else ()
            known = "; ".join(map(_join_names, FORMATS))
            raise UsageError(
                f"{where} has no columns of a known format, but {shorten(own) or 'none'}: rename "
                f"them to one of {known}"
            )
        name = _join_names(columns)
        with naming_row(where, f"text, or no turns, in {name}"):
            if row.get("chosen"):
                raise UsageError("it has chosen: examples/preference.py learns from such pairs")
            if row.get("label") is False:
                raise UsageError("its label is false: leave out what is not wanted as an answer")
            conversations.append((where, read_conversation(row, *columns)))
        formats[name] = None
    return conversations, "; ".join(formats)


def _join_names(columns: Sequence[str]) -> str:
    return " and ".join(filter(None, columns))


@contextlib.contextmanager
def naming_row(where: str, lacks: str) -> Iterator[None]:
    """Raise a UsageError that names the place if a row cannot be read, or lacks something."""
    try:
        yield
    except UsageError as problem:
        raise UsageError(f"{where}: {problem}") from problem
    except (TypeError, KeyError, AttributeError, ValueError) as problem:
        raise UsageError(f"{where} has no {lacks}") from problem


def read_conversation(row: dict[str, Any], prompt: str, answer: str) -> Conversation:
    """Return the conversation that a row has in these columns; prompt may be "".

    Raises UsageError for a row that has something without which it would mean something else, and
    what as_turns raises.
    """
    if bad := [name for name in NOT_READ if row.get(name)]:
        raise UsageError(f"it has {bad[0]}, and only texts and turns are read: leave it out")
    inputs, tools, system = (
        next((name for name in names if row.get(name)), "")
        for names in (INPUTS if prompt == "instruction" else (), TOOLS, SYSTEM)
    )
    text, before, turns = None, [], []
    if answer == "text":
        text = row[answer] + ""
    else:
        if prompt:
            more = ("\n\n" if row[prompt] else "") + row[inputs] if inputs else ""
            before = as_turns(row[prompt] + more if more else row[prompt], "user")
        said = row[answer] if prompt else _decode(row[answer])
        after = as_turns(said, "assistant")
        if before and after and after[0]["role"] in OPENING:
            raise UsageError(f"its answer begins with a turn of {after[0]['role']}: leave that out")
        turns = before + after
    functions = _functions(tools, row[tools]) if tools else ()
    read = {prompt, answer, inputs, tools, system, "label", "chosen", "rejected"}
    unread = tuple(str(name) for name in row if row[name] not in EMPTY and name not in read)
    conversation = Conversation(turns, len(before), functions, text, unread)
    return with_system(conversation, _join_parts(row[system]) if system else "")


def comparable(turns: list[Turn]) -> list[tuple[str, str, str]]:
    """Return what must be equal in turns that are the same; white space may differ."""
    return [
        (turn["role"], "".join(nfc(turn["content"]).split()), json.dumps(turn.get("tool_calls")))
        for turn in turns
    ]


def number_equal_turns(conversations: Iterable[Conversation]) -> torch.Tensor:
    """Return for each conversation the number of the first that equals it, int64."""
    keys = ([comparable(row.turns), row.text, row.tools] for row in conversations)
    return splits.number_equal(json.dumps(key, default=str) for key in keys)


def with_system(conversation: Conversation, system: str | None) -> Conversation:
    """Return the conversation with this text as a system turn, unless it begins with one."""
    turns = conversation.turns
    num_prompt = conversation.num_prompt
    if not system or not turns or turns[0]["role"] in PREAMBLES:
        return conversation
    turns = [{"role": "system", "content": system}, *turns]
    return conversation._replace(turns=turns, num_prompt=num_prompt + 1)


def _join_parts(content: Any) -> str:
    """Return a content as text: of the parts of OpenAI most templates would write Python's list.

    Raises UsageError for parts that are no text, TypeError for what is neither text nor parts.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TypeError
    if bad := [part["type"] for part in content if part["type"] not in PARTS]:
        raise UsageError(f"a turn holds {bad[0]}, and only text can be learned from")
    return "".join(part["text"] for part in content)


def as_turns(value: Any, role: str) -> list[Turn]:
    """Return turns as templates take them: of a list, of one turn, or of a text that `role` says.

    Raises TypeError, KeyError, AttributeError or ValueError for others, UsageError for a picture,
    for a role that is not known and for calls of tools that cannot be read.
    """
    value = {"role": role, "content": value} if isinstance(value, str) else value
    return [_as_turn(turn) for turn in ([value] if isinstance(value, dict) else value)]


def _as_turn(turn: dict[str, Any]) -> Turn:
    speaker = turn["from"] if "from" in turn else turn.get("role")  # ShareGPT has from and value
    content = turn["value"] if "value" in turn else turn.get("content")
    calls = turn.get("tool_calls") or turn.get("function_call") or []
    if speaker is None or not (calls or {"value", "content"} & turn.keys()):
        raise UsageError(
            f"a turn has {shorten(sorted(turn)) or 'nothing'}: rename them to role and content, or "
            "to from and value"
        )
    if wrong := [name for name in WEIGHTS if turn.get(name) not in (None, 0, 1)]:
        raise UsageError(f"a turn has the {wrong[0]} {turn[wrong[0]]!r}: only 0 and 1 are read")
    role = ROLES.get(speaker.strip().lower())
    if role is None:
        raise UsageError(
            f"a turn has the role {speaker!r}: rename it to user, assistant, system or tool"
        )
    calls = _functions("calls of tools", calls)
    content = _join_parts(content or ("" if calls else content))
    kept = {name: value for name, value in _without_nulls(turn).items() if name not in TURN}
    return kept | {"role": role, "content": content} | ({"tool_calls": calls} if calls else {})


def _functions(what: str, values: Any) -> list[dict[str, Any]]:
    """Return tools, or calls of tools, as transformers has them, also if they are given as JSON."""
    values = _decode(values)
    functions = []
    for value in values if isinstance(values, list) else [values]:
        value = _without_nulls(_decode(value))
        if not isinstance(value, dict):
            raise UsageError(f"its {what} are not JSON objects: {str(value)[:60]!r}")
        function = value.get("function", value)
        if isinstance(function.get("arguments"), str):  # most templates would quote it once more
            function = function | {"arguments": _decode(function["arguments"] or "{}")}
        if isinstance(function.get("arguments"), str):
            raise UsageError(
                f"the arguments of a call of a tool are not JSON: {function['arguments'][:60]!r}"
            )
        functions.append({"type": "function", "function": function})
    return functions


def _decode(value: Any) -> Any:
    """Return the object or the list that a text is as JSON; another value as it is."""
    with contextlib.suppress(TypeError, json.JSONDecodeError):
        decoded = json.loads(value)
        return decoded if isinstance(decoded, dict | list) else value
    return value


def _without_nulls(value: Any) -> Any:
    """Remove the nulls that a table holds for fields that only other rows have."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
