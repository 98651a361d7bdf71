"""Read conversations from files: which columns a row has, who speaks, how tools are called."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from trainkit.errors import UsageError, as_usage_error
from trainkit.text import shorten

Turn = dict[str, Any]  # role and content, both texts, and perhaps tool_calls


class Format(NamedTuple):
    """The columns of a row. If `prompt` is empty, `answer` has a whole conversation, or a text."""

    answer: str
    prompt: str = ""
    more: tuple[str, ...] = ()  # the first of these that is not empty is a part of the prompt

    @property
    def columns(self) -> list[str]:
        return [name for name in (self.prompt, self.answer) if name]


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
    """

    turns: list[Turn]
    num_prompt: int = 0
    tools: Sequence[Any] = ()
    text: str | None = None


def read_conversation_rows(data: str) -> Iterator[tuple[str, Any]]:
    """Yield each row and its place.

    data: a JSON lines, JSON or Parquet file, a folder that `datasets` can load, or a Hub id.
    Blank lines are skipped. Raises a UsageError that names the line if a line is not JSON.
    """
    path = Path(data)
    if path.suffix == ".parquet" and path.is_file():
        rows = pq.read_table(path).to_pylist()
    elif path.is_file():
        content = path.read_bytes()
        rows = _read_json(content) if path.suffix == ".json" else None
        if rows is None:
            for number, line in enumerate(content.splitlines(), 1):
                where = f"line {number} of {path}"
                if line.strip():
                    with as_usage_error(f"{where} is not JSON, and only JSON and Parquet are read"):
                        row = json.loads(line)
                    yield where, row
            return
    else:
        import datasets

        saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
        rows = datasets.load_from_disk(path) if saved else datasets.load_dataset(data)
        rows = rows["train"] if isinstance(rows, dict) else rows
    for number, row in enumerate(rows, 1):
        yield f"row {number} of {data}", row


def _read_json(content: bytes) -> list[Any] | None:
    """Return the rows of a file that is a list, or one row; None if each line is a value."""
    try:
        rows = json.loads(content)
    except json.JSONDecodeError as problem:
        if problem.msg != "Extra data":
            raise
        return None
    return rows if isinstance(rows, list) else [rows]


def read_conversations(data: str) -> tuple[list[tuple[str, Conversation]], str]:
    """Return all conversations, each with its place, and the columns they come from.

    Raises a UsageError that names the first row that lacks such columns, or has no texts in them.
    """
    conversations: list[tuple[str, Conversation]] = []
    formats: dict[str, None] = {}
    for where, row in read_conversation_rows(data):
        columns = {*row} if isinstance(row, dict) else set()
        kind = next((kind for kind in FORMATS if columns.issuperset(kind.columns)), None)
        if kind is None:
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
        return with_context([], 0, row)._replace(text=row["text"] + "")
    answer = as_turns(row[kind.answer], "assistant")
    return with_context(*join_prompt(read_prompt(kind, row), answer), row)


def read_prompt(kind: Format, row: dict[str, Any]) -> list[Turn]:
    """Return the turns of the prompt that a row has in the columns of a format, if it has one."""
    if not kind.prompt:
        return []
    prompt = row[kind.prompt]
    more = next((row[name] for name in kind.more if row.get(name)), "")
    if more:
        if prompt != "":
            prompt += "\n\n"
        prompt += more
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
        (turn["role"], "".join(turn["content"].split()), json.dumps(turn.get("tool_calls")))
        for turn in turns
    ]


def with_context(turns: list[Turn], num_prompt: int, row: dict[str, Any]) -> Conversation:
    """Return the conversation with the tools and the system turn that its row has.

    Raises UsageError for a row that has something that is not read.
    """
    if unread := [name for name in NOT_READ if row.get(name)]:
        raise UsageError(f"it has {unread[0]}, and only texts and turns are read: leave it out")
    conversation = Conversation(turns, num_prompt, _functions("tools", row.get("tools") or []))
    return with_system(conversation, row.get("system") or row.get("system_prompt"))


def with_system(conversation: Conversation, system: str | None) -> Conversation:
    """Return the conversation with this text as a system turn, unless it begins with one."""
    turns = conversation.turns
    num_prompt = conversation.num_prompt
    if not system or not turns or turns[0]["role"] in PREAMBLES:
        return conversation
    turns = [{"role": "system", "content": system}, *turns]
    return conversation._replace(turns=turns, num_prompt=num_prompt + 1)


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
    content = content or "" if calls else content
    if isinstance(content, list):  # most templates would write it as Python does
        if others := [part["type"] for part in content if part["type"] != "text"]:
            raise UsageError(f"a turn holds {others[0]}, and only text can be learned from")
        content = "".join(part["text"] if "text" in part else part["value"] for part in content)
    if not isinstance(content, str):
        raise TypeError
    read = ("from", "value", "tool_calls", "function_call")
    kept = {name: value for name, value in _without_nulls(turn).items() if name not in read}
    return kept | {"role": role, "content": content} | ({"tool_calls": calls} if calls else {})


def _functions(what: str, values: Any) -> list[dict[str, Any]]:
    """Return tools, or calls of tools, as transformers has them, also if they are given as JSON."""
    values = _decode(values)
    functions = []
    for value in values if isinstance(values, list) else [values]:
        value = _without_nulls(_decode(value))
        if not isinstance(value, dict):
            raise UsageError(f"its {what} are no JSON objects: {str(value)[:60]!r}")
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
