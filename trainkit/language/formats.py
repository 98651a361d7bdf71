"""Read conversations from files: which columns a row has, who speaks, how tools are called."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch

from trainkit.errors import UsageError, as_usage_error
from trainkit.reading import splits
from trainkit.reading.encodings import to_utf8
from trainkit.reading.paths import is_read, read_here_or_from_hub, refuse_pipe
from trainkit.text import count, nfc, shorten

Turn = dict[str, Any]  # role and content, both texts, and perhaps tool_calls


class Format(NamedTuple):
    """The columns of a row. If `prompt` is empty, `answer` has a whole conversation, or a text."""

    answer: str
    prompt: str = ""
    more: tuple[str, ...] = ()  # the first of these that is not empty is a part of the prompt

    @property
    def columns(self) -> list[str]:
        return [name for name in (self.prompt, self.answer) if name]

    def context(self, row: dict[str, Any]) -> str:
        """Return the column of `more` that is a part of the prompt, or ""."""
        return next((name for name in self.more if row.get(name)), "")


SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet")  # of files
INPUT = ("input", "context")
# A row has the first format whose columns are all there.
FORMATS = (
    Format("messages"),
    Format("conversations"),
    Format("completion", "prompt"),
    Format("answer", "prompt"),
    Format("response", "prompt"),
    Format("answer", "question"),
    Format("response", "question"),
    Format("output", "instruction", INPUT),
    Format("response", "instruction", INPUT),
    Format("text"),
)
# Where a row of two answers may have its prompt. In such a row `messages` often is an answer.
PROMPTS = (*(Format("", kind.prompt, kind.more) for kind in FORMATS), Format("", "conversations"))
# Columns without which the text of a row would mean something else.
NOT_READ = ("image", "images", "video", "videos", "audio", "audios", "history")
# A row has the first of these columns that is not empty.
TOOLS, SYSTEM = ("tools", "functions"), ("system", "system_prompt")
EMPTY: tuple[Any, ...] = (None, "", [], {})  # False and 0 are values
PARTS = ("text", "input_text", "output_text", "refusal")  # of a content that is a list
TURN = ("from", "value", "tool_calls", "function_call", "refusal")  # keys that become others
# What files call those who speak, in small letters. ipython and function are names of templates.
USER, ASSISTANT = ("user", "human", "prompter"), ("assistant", "gpt", "chatgpt", "bot", "model")
ROLES = (
    dict.fromkeys(USER, "user")
    | dict.fromkeys((*ASSISTANT, "ai", "chatbot", "bard", "bing"), "assistant")
    | dict.fromkeys(("tool", "observation", "tool_response", "function_response"), "tool")
    | {name: name for name in ("system", "developer", "ipython", "function")}
)
PREAMBLES = ("system", "developer")  # a conversation has one at most
CALLS = ("function_call", "tool_call")  # these speakers are an assistant that calls tools


class Conversation(NamedTuple):
    """The turns of a conversation, as chat templates take them, or one text.

    Attributes:
        turns: those of tool_calls have functions as transformers has them. Arguments that are not
            JSON are texts, all others are values.
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


class Part(NamedTuple):
    """A part of a data set: what it is called, and its rows, each with its place, read once."""

    name: str
    rows: Iterator[tuple[str, Any]]


class Rows(NamedTuple):
    """Rows with their places: to train on, chosen by the user to evaluate on, and a plan line."""

    train: list[tuple[str, Any]]
    given: list[tuple[str, Any]]
    plan: dict[str, str]


def read_chat_rows(data: str, eval_data: str | None, is_known: Callable[[Any], bool]) -> Rows:
    """Read the rows of --data, and those of --eval-data or of a test split if there is one.

    is_known: whether a row has what is to be learned. Of a split the first row is asked. See
    read_conversation_rows.
    """
    parts, note = _split_by_column(read_chat_parts(data, f"--data {data}"))
    read: dict[str, list[tuple[str, Any]]] = {}

    def is_labelled(split: str) -> bool:
        read[split] = [*parts[split].rows]
        return bool(read[split]) and is_known(read[split][0][1])

    names = {split: part.name for split, part in parts.items()}
    split, unread = splits.choose_evaluated(names, is_labelled, bool(eval_data))
    given: list[tuple[str, Any]] = []
    name = ""
    if eval_data:
        own, _ = _split_by_column(read_chat_parts(eval_data, f"--eval-data {eval_data}"))
        part = next((own[split] for split in splits.EVALUATED if split in own), own["train"])
        given = [*part.rows]
        name = f"--eval-data {eval_data}"
        if len(own) > 1:
            name += f", {part.name}"
        name += f": {count(len(given), 'row')}"
    elif split:
        given = read[split]
        name = f"{names[split]}: {count(len(given), 'row')}"
    if given and len(parts) == 1:  # nobody needs a column that might have told what is evaluated
        note = ""
    plan = splits.describe_given(name, unread, note)
    return Rows([*parts["train"].rows], given, plan)


def _split_by_column(parts: dict[str, Part]) -> tuple[dict[str, Part], str]:
    """Return the parts that a column of the only one tells, and a sentence about such columns."""
    if len(parts) > 1:
        return parts, ""
    rows = [*parts["train"].rows]
    names = {name: None for _, row in rows if isinstance(row, dict) for name in row}
    columns = {
        name: [row.get(name) if isinstance(row, dict) else None for _, row in rows]
        for name in names
        if splits.may_say_split(name)
    }
    found = splits.read_split_columns(columns)
    if not found.rows:
        return {"train": Part(parts["train"].name, iter(rows))}, found.note

    def without(row: Any) -> Any:
        return {name: row[name] for name in row if name not in found.columns}

    return {
        split: Part(found.names[split], iter([(rows[n][0], without(rows[n][1])) for n in numbers]))
        for split, numbers in found.rows.items()
    }, found.note


def read_conversation_rows(data: str) -> Iterator[tuple[str, Any]]:
    """Yield each row to train on, and its place.

    data: a JSON lines, JSON or Parquet file, a folder of them or one that `datasets` can load, or a
    Hub id. Blank lines are skipped. Raises a UsageError that names the line if a line is not JSON.
    """
    return read_chat_parts(data, f"--data {data}")["train"].rows


def read_chat_parts(data: str, where: str) -> dict[str, Part]:
    """Return the rows of each split that the user made, as splits.find_splits names them.

    where: begins the sentence of a UsageError.
    """
    path = Path(data)
    if path.is_file():
        return {"train": Part(path.name, _read_file(path))}
    refuse_pipe(path, where)
    files = [file.relative_to(path).as_posix() for file in sorted(path.rglob("*"))]
    files = [file for file in files if is_read(file) and file.endswith(SUFFIXES)]
    found = splits.find_splits(files)
    if len(found) > 1 and not splits.is_saved(path):
        return {
            split: Part(shorten(names), chain.from_iterable(_read_file(path / x) for x in names))
            for split, names in found.items()
        }
    with read_here_or_from_hub(data, where):
        loaded = splits.load_parts(data)
    places = {split: f"{data}, {split}" if len(loaded) > 1 else data for split in loaded}
    return {
        split: Part(name, _number(rows, places[split])) for split, (name, rows) in loaded.items()
    }


def _number(rows: Iterable[Any], place: str) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, 1):
        yield f"row {number} of {place}", row


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        yield from _number(pq.read_table(path).to_pylist(), str(path))
        return
    content = path.read_bytes()
    with _refusing_other_encodings(str(path)):
        content = to_utf8(content)
    rows = _read_json(content, path) if path.suffix == ".json" else None
    if rows is not None:
        yield from _number(rows, str(path))
        return
    for number, line in enumerate(content.splitlines(), 1):
        where = f"line {number} of {path}"
        if line.strip():
            with as_usage_error(f"{where} is not JSON, and only JSON and Parquet are read"):
                row = _parse_json(line, where)
            yield where, row


@contextlib.contextmanager
def _refusing_other_encodings(where: str) -> Iterator[None]:
    """Raise a UsageError that begins with `where` if bytes are not what they should be."""
    try:
        yield
    except UnicodeDecodeError:
        raise UsageError(f"{where} is not in UTF-8, as JSON must be: save the file in it") from None


def _parse_json(content: bytes, where: str) -> Any:
    """Return json.loads of this. Raises a UsageError that begins with `where` if it is no UTF-8."""
    with _refusing_other_encodings(where):
        return json.loads(content)


def _read_json(content: bytes, path: Path) -> list[Any] | None:
    """Return the rows of a file that is a list, or one row; None if each line is a value."""
    try:
        rows = _parse_json(content, str(path))
    except json.JSONDecodeError as problem:
        if problem.msg != "Extra data":
            raise
        return None
    return rows if isinstance(rows, list) else [rows]


def read_conversations(
    rows: Iterable[tuple[str, Any]],
) -> tuple[list[tuple[str, Conversation]], str]:
    """Return all conversations, each with its place, and the columns they come from.

    Raises a UsageError that names the first row that lacks such columns, or has no texts in them.
    """
    conversations: list[tuple[str, Conversation]] = []
    formats: dict[str, None] = {}
    for where, row in rows:
        kind = find_format(row)
        if kind is None:
            columns = {*row} if isinstance(row, dict) else set()
            column_names = "; ".join(" and ".join(kind.columns) for kind in FORMATS)
            raise UsageError(
                f"{where} has no columns of a known format, but "
                f"{shorten(sorted(columns)) or 'none'}: rename them to one of {column_names}"
            )
        name = " and ".join(kind.columns)
        with naming_row(where, f"text, or no turns, in {name}"):
            conversations.append((where, _read_conversation(kind, row)))
        formats[name] = None
    return conversations, "; ".join(formats)


def find_format(row: Any) -> Format | None:
    """Return the first format whose columns a row has."""
    columns = {*row} if isinstance(row, dict) else set()
    return next((kind for kind in FORMATS if columns.issuperset(kind.columns)), None)


def same_turns(conversations: Iterable[Conversation]) -> torch.Tensor:
    """Return for each conversation the number of the first that equals it, int64."""
    keys = (
        json.dumps([comparable(row.turns), row.text, row.tools], default=str)
        for row in conversations
    )
    return splits.number_equal(keys)


@contextlib.contextmanager
def naming_row(where: str, lacks: str) -> Iterator[None]:
    """Raise a UsageError that names the place if a row cannot be read, or lacks something."""
    try:
        yield
    except UsageError as problem:
        raise UsageError(f"{where}: {problem}") from problem
    except (TypeError, KeyError, AttributeError, ValueError) as problem:
        raise UsageError(f"{where} has no {lacks}") from problem


def _read_conversation(kind: Format, row: dict[str, Any]) -> Conversation:
    if row.get("chosen"):
        raise UsageError("it has chosen: examples/preference.py learns from pairs of answers")
    if row.get("label") is False:
        raise UsageError("its label is false: leave out what is not wanted as an answer")
    if kind.answer == "text":
        return with_context([], 0, row, kind)._replace(text=row["text"] + "")
    answer = as_turns(row[kind.answer], "assistant")
    return with_context(*join_prompt(read_prompt(kind, row), answer), row, kind)


def read_prompt(kind: Format, row: dict[str, Any]) -> list[Turn]:
    """Return the turns of the prompt that a row has in the columns of a format, if it has one."""
    if not kind.prompt:
        return []
    prompt = row[kind.prompt]
    if name := kind.context(row):
        if prompt != "":
            prompt += "\n\n"
        prompt += row[name]
    return as_turns(prompt, "user")


def join_prompt(
    prompt: list[Turn], answer: list[Turn], num_shared: int = 0
) -> tuple[list[Turn], int]:
    """Return a prompt and its answer as one conversation, and how many of its turns are the prompt.

    The answer may repeat the prompt, or its last turns, also after earlier turns or a system turn.
    A repetition is recognised by its turns, without regard to white space. num_shared is the number
    of turns that two answers have in common, which are the prompt if there is no other. Raises
    UsageError if the answer has another prompt.
    """
    if not prompt:
        return answer, num_shared
    continues = not answer or answer[0]["role"] not in (*PREAMBLES, "user")
    turns, wanted = comparable(answer), comparable(prompt)
    has_system = any(turn["role"] in PREAMBLES for turn in answer)
    system = prompt[: prompt[0]["role"] in PREAMBLES and not has_system]
    wanted = wanted[len(system) :]
    last = num_shared or len(turns)
    stops = [
        stop for stop in range(len(wanted), last + 1) if turns[stop - len(wanted) : stop] == wanted
    ]
    if continues and not (num_shared and stops):
        return prompt + answer, len(prompt)
    if stops:
        stop = stops[-1] if num_shared else stops[0]
        return system + answer, len(system) + stop
    for num in range(len(wanted) - 1, 0, -1):
        if turns[:num] == wanted[-num:]:
            return prompt + answer[num:], len(prompt)
    raise UsageError(
        "the turns before its answer are not those of its prompt: leave one of the two out"
    )


def comparable(turns: list[Turn]) -> list[tuple[str, str, str]]:
    """Return what must be equal in turns that are the same; white space may differ."""
    return [
        (turn["role"], "".join(nfc(turn["content"]).split()), json.dumps(turn.get("tool_calls")))
        for turn in turns
    ]


def with_context(
    turns: list[Turn], num_prompt: int, row: dict[str, Any], kind: Format
) -> Conversation:
    """Return the conversation with the tools and the system turn that its row has.

    kind: of the columns that the turns are from. Raises UsageError for a row that has something
    without which it would mean something else.
    """
    if unread := [name for name in NOT_READ if row.get(name)]:
        raise UsageError(f"it has {unread[0]}, and only texts and turns are read: leave it out")
    tools, system = (next((n for n in names if row.get(n)), "") for names in (TOOLS, SYSTEM))
    functions = _functions(tools, row[tools]) if tools else ()
    read = {*kind.columns, kind.context(row), tools, system, "label", "chosen", "rejected"}
    others = tuple(str(name) for name in row if row[name] not in EMPTY and name not in read)
    conversation = Conversation(turns, num_prompt, functions, unread=others)
    if system and not isinstance(row[system], str | list):
        raise UsageError(f"its {system} is no text, but {row[system]!r:.60}")
    return with_system(conversation, _join_parts(row[system])[0] if system else "")


def with_system(conversation: Conversation, system: str | None) -> Conversation:
    """Return the conversation with this text as a system turn, unless it begins with one."""
    turns = conversation.turns
    num_prompt = conversation.num_prompt
    if not system or not turns or turns[0]["role"] in PREAMBLES:
        return conversation
    turns = [{"role": "system", "content": system}, *turns]
    return conversation._replace(turns=turns, num_prompt=num_prompt + 1)


def _join_parts(content: Any) -> tuple[str, str]:
    """Return what a content says and what was thought before, both as texts.

    content: a text, or the parts that OpenAI and Anthropic make of it, which most templates would
    write as Python does. Raises UsageError for parts that are neither, TypeError for others.
    """
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        raise TypeError
    texts = {"says": "", "thinks": ""}
    for part in content:
        kind = part["type"]
        if kind not in PARTS and kind != "thinking":
            raise UsageError(f"a turn holds {kind}, and only text can be learned from")
        names = [name for name in ("text", "value", kind) if name in part]
        texts["thinks" if kind == "thinking" else "says"] += part[names[0]]
    return texts["says"], texts["thinks"]


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
    if speaker is None or not (calls or {"value", "content", "refusal"} & turn.keys()):
        raise UsageError(
            f"a turn has {shorten(sorted(turn)) or 'nothing'}: rename them to role and content, or "
            "to from and value"
        )
    if turn.get("weight") not in (None, 0, 1):
        raise UsageError(f"a turn has the weight {turn['weight']!r}: only 0 and 1 are read")
    role = ROLES.get(speaker.strip().lower())
    if speaker.strip().lower() in CALLS:
        role, content, calls = "assistant", None, content
    if role is None:
        raise UsageError(
            f"a turn has the role {speaker!r}: rename it to user, assistant, system or tool"
        )
    calls = _functions("calls of tools", calls)
    content = content or turn.get("refusal") or ("" if calls else content)
    content, thoughts = _join_parts(content)
    kept = {name: value for name, value in _without_nulls(turn).items() if name not in TURN}
    if thoughts:
        kept = {"reasoning_content": thoughts} | kept
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
        functions.append({"type": "function", "function": function})
    return functions


def _decode(value: Any) -> Any:
    """Return what a text is as JSON, also if it was encoded twice; another text as it is."""
    try:
        decoded = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value
    decoded = _decode(decoded) if isinstance(decoded, str) else decoded
    return decoded if isinstance(decoded, dict | list) else value


def _without_nulls(value: Any) -> Any:
    """Remove the nulls that a table holds for fields that only other rows have."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
