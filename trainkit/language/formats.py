"""Read conversations from files: which columns a row has, who speaks, how tools are called."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from trainkit.errors import UsageError, as_usage_error
from trainkit.reading import splits
from trainkit.reading.paths import is_read, read_here_or_from_hub, refuse_pipe
from trainkit.text import count, nfc, shorten

Turn = dict[str, Any]  # role and content, both texts, and perhaps tool_calls
Rows = Iterator[tuple[str, Any]]  # each with the place that a message names

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet")  # of files
# Columns of a whole conversation, of a prompt and of its answer; a row of two answers has others.
WHOLE = ("messages", "conversations")
PROMPTS = ("prompt", "question", "instruction")
ANSWERS = ("completion", "answer", "output", "response")
INPUTS = ("input", "context")  # the first that is not empty ends an instruction or a question
TOOLS, SYSTEM = ("tools", "functions"), ("system", "system_prompt")  # the first that is not empty
# Columns without which the text of a row would mean something else.
NOT_READ = ("image", "images", "video", "videos", "audio", "audios", "history")
EMPTY: tuple[Any, ...] = (None, "", [], {})  # False and 0 are values
# Columns of KTO, and what they say of an answer that is not wanted.
LABELS, UNWANTED = ("label", "kto_tag"), ("false", "0", "0.0")
TURN = ("from", "value", "tool_calls", "function_call")  # keys that become others
# Of a turn: those of OpenAI, LLaMA-Factory, Axolotl and ms-swift.
WEIGHTS = ("weight", "loss_weight", "train", "loss")
# What files call those who speak, in small letters.
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ROLES |= dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant") | {"human": "user"}
ROLES |= dict.fromkeys(("function", "observation", "function_response"), "tool")
PREAMBLES = ("system", "developer")  # a conversation has one at most
OPENING = (*PREAMBLES, "user")  # an answer does not begin with these


class Conversation(NamedTuple):
    """The turns of a conversation, as chat templates take them, or one text."""

    turns: list[Turn]  # the arguments of their calls of tools are values, and no JSON
    num_prompt: int = 0  # turns, or letters of the text, at the start, of which none is learned
    tools: Sequence[Any] = ()  # descriptions for the template
    text: str | None = None  # used instead of turns, without a chat template
    unread: tuple[str, ...] = ()  # columns of its row that are not empty and were not read

    def with_system(self, system: str | None) -> "Conversation":
        """Return the conversation with this text as a system turn, unless it begins with one."""
        if not system or not self.turns or self.turns[0]["role"] in PREAMBLES:
            return self
        turns = [{"role": "system", "content": system}, *self.turns]
        return self._replace(turns=turns, num_prompt=self.num_prompt + 1)

    def as_key(self) -> str:
        """Return a text that is the same for equal conversations; white space may differ."""
        return json.dumps([comparable(self.turns), self.text, self.tools], default=str)


def read_chat_rows(
    data: str, eval_data: str | None, flag: str = "--data"
) -> tuple[list[tuple[str, Any]], int, dict[str, str]]:
    """Return the rows of --data, how many at their end are to be evaluated, and lines of the plan.

    Evaluated are those of --eval-data, or of a test split. Each row comes with its place. data: a
    file of JSON lines, JSON or Parquet, a folder of them or of `datasets`, or a Hub id.
    """
    parts = _find_parts(data, f"{flag} {data}")
    found = splits.find_splits([*parts])
    names = {split: shorten(names) for split, names in found.items()}
    split, unread = splits.choose_evaluated(names, lambda _: True, bool(eval_data))
    train, given = (
        [row for part in found.get(side, ()) for row in parts[part]] for side in ("train", split)
    )
    name = names.get(split, "")
    if eval_data:
        own, num, _ = read_chat_rows(eval_data, None, "--eval-data")
        given, name = own[-num:], f"--eval-data {eval_data}"
    for where, row in train if flag == "--data" and not given else ():
        said = row.get("split") if isinstance(row, dict) else None
        if isinstance(said, str) and splits.says_split("split", [said]):
            raise UsageError(
                f"{where} has the split {said!r}, and columns say no split: write these rows to a "
                "file of their own and give it as --eval-data"
            )
    told = f"{name}: {count(len(given), 'row')}" if name else ""
    return train + given, len(given), splits.describe_given(told, unread)


def _find_parts(data: str, where: str) -> dict[str, Rows]:
    """Return the rows of each file of a folder, or part of a data set, by its name."""
    path = Path(data)
    if path.is_file():
        return {path.name: _read_file(path)}
    refuse_pipe(path, where)
    files = [file.relative_to(path).as_posix() for file in sorted(path.rglob("*"))]
    files = [file for file in files if is_read(file) and file.endswith(SUFFIXES)]
    if files and not splits.is_saved(path):
        return {file: _read_file(path / file) for file in files}
    with read_here_or_from_hub(data, where):
        loaded = splits.load_parts(data)
    named = {names or split: rows for split, (names, rows) in loaded.items()}
    return {name: _number(rows, f"{data}, {name}") for name, rows in named.items()}


def _number(rows: Iterable[Any], place: str) -> Rows:
    """Yield the rows of a table, without the nulls for fields that only other rows have."""
    for number, row in enumerate(rows, 1):
        yield f"row {number} of {place}", _without_nulls(row)


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
        rows = rows if isinstance(rows, list) else [rows]
        yield from ((f"row {number} of {path}", row) for number, row in enumerate(rows, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            with as_usage_error(f"line {number} of {path} is not JSON"):
                row = json.loads(line)
            yield f"line {number} of {path}", row


def read_chat(row: Any) -> tuple[str, Conversation]:
    """Return the names of the columns that a row is read from, and its conversation."""
    known = [*product([""], WHOLE), *product(PROMPTS, ANSWERS), ("", "text")]
    own = {*row} if isinstance(row, dict) else set()
    columns = next((pair for pair in known if own.issuperset(filter(None, pair))), None)
    if columns is None:
        raise ValueError(
            f"its columns are {shorten(sorted(own)) or 'none'}: rename them to {' or '.join(WHOLE)}"
            f", to text, or to {', '.join(PROMPTS)} beside {', '.join(ANSWERS)}"
        )
    if row.get("chosen"):
        raise ValueError("it has chosen: examples/preference.py learns from such pairs")
    bad = [name for name in LABELS if str(row.get(name)).strip().lower() in UNWANTED]
    if bad and columns != ("", "text"):
        raise ValueError(
            f"its {bad[0]} is {row[bad[0]]}: leave out what is not wanted as an answer"
        )
    return " and ".join(filter(None, columns)), read_conversation(row, *columns)


def read_conversation(row: dict[str, Any], prompt: str, answer: str) -> Conversation:
    """Return the conversation that a row has in these columns; prompt may be "".

    Raises ValueError for a row that has something without which it would mean something else.
    """
    if bad := [name for name in NOT_READ if row.get(name)]:
        raise ValueError(f"it has {bad[0]}, and only texts and turns are read: leave it out")
    if answer == "text":
        unread = _name_unread(row, {answer})
        return Conversation([], text=_join_parts(row[answer]), unread=unread)
    ends = INPUTS if prompt in ("instruction", "question") else ()
    inputs, tools, system = (
        next((name for name in names if row.get(name)), "") for names in (ends, TOOLS, SYSTEM)
    )
    before = as_turns(row[prompt], "user") if prompt and not inputs else []
    if inputs:
        asked = "\n\n".join(filter(None, (_join_parts(row[x] or "") for x in (prompt, inputs))))
        before = [{"role": "user", "content": asked}]
    after = as_turns(row[answer], "" if answer in WHOLE else "assistant")
    if before and after and after[0]["role"] in OPENING:
        raise ValueError(f"its answer begins with a turn of {after[0]['role']}: leave that out")
    functions = _functions(tools, row[tools]) if tools else ()
    unread = _name_unread(row, {prompt, answer, inputs, tools, system})
    conversation = Conversation(before + after, len(before), functions, unread=unread)
    return conversation.with_system(_join_parts(row[system]) if system else "")


def _name_unread(row: dict[str, Any], read: set[str]) -> tuple[str, ...]:
    """Return the columns that are not empty and that nobody reads."""
    read |= {*LABELS, "chosen", "rejected"}
    return tuple(str(name) for name in row if row[name] not in EMPTY and name not in read)


def comparable(turns: list[Turn]) -> list[tuple[str, str, str]]:
    """Return what must be equal in turns that are the same; white space may differ."""
    return [
        (turn["role"], "".join(nfc(turn["content"]).split()), json.dumps(turn.get("tool_calls")))
        for turn in turns
    ]


def as_turns(value: Any, role: str) -> list[Turn]:
    """Return turns as templates take them: of a list, of one turn, of these as JSON, or of a text.

    role: who says a text; "" takes none. Raises ValueError for what cannot be read.
    """
    turns = _decode(value)
    turns = [turns] if isinstance(turns, dict) else turns
    are_turns = isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
    if isinstance(value, str) and role:
        # JSON may also be what is said.
        say = are_turns and any({*turn} & {"content", "value"} for turn in turns)
        speak = are_turns and all({*turn} & {"role", "from"} for turn in turns)
        turns = turns if say and speak else [{"role": role, "content": value}]
    elif not are_turns:
        raise ValueError(f"it has no text and no turns, but {value!r:.60}")
    return [_as_turn(turn) for turn in turns]


def _as_turn(turn: dict[str, Any]) -> Turn:
    speaker = turn.get("from", turn.get("role"))  # ShareGPT has from and value
    content = turn.get("value", turn.get("content"))
    calls = turn.get("tool_calls") or turn.get("function_call") or []
    role = ROLES.get(str(speaker).strip().lower())
    if role is None:
        raise ValueError(
            f"a turn of {shorten(sorted(turn)) or 'nothing'} has the role {speaker!r}: rename it to"
            " user, assistant, system or tool, and the keys to role and content"
        )
    if wrong := [name for name in WEIGHTS if turn.get(name) not in (None, 0, 1)]:
        raise ValueError(f"a turn has the {wrong[0]} {turn[wrong[0]]!r}: only 0 and 1 are read")
    kept = {n: part for n, part in turn.items() if part is not None and n not in TURN}
    kept |= {"role": role, "content": _join_parts(content or ("" if calls else content))}
    return kept | ({"tool_calls": _functions("calls of tools", calls)} if calls else {})


def _join_parts(content: Any) -> str:
    """Return a content as text: of the parts of OpenAI most templates would write Python's list."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"it has no text, but {content!r:.60}")
    parts = [part if isinstance(part, dict) else {"type": part} for part in content]
    if bad := [part for part in parts if not isinstance(part.get("text"), str)]:
        raise ValueError(f"a turn holds {bad[0].get('type')}, and only text can be learned from")
    return "".join(part["text"] for part in parts)


def _functions(what: str, values: Any) -> list[dict[str, Any]]:
    """Return tools, or calls of tools, as transformers has them, also if they are given as JSON."""
    values = _decode(values)
    functions = []
    for value in values if isinstance(values, list) else [values]:
        if not isinstance(value, dict):
            raise ValueError(f"its {what} are not JSON objects: {value!r:.60}")
        function = {n: x for n, x in value.get("function", value).items() if x is not None}
        if "arguments" in function:  # most templates would quote JSON once more
            given = function["arguments"] = _decode(function["arguments"] or {})
            if isinstance(given, str):
                raise ValueError(f"the arguments of a call of a tool are not JSON: {given!r:.60}")
        functions.append({"type": "function", "function": function})
    return functions


def _decode(value: Any) -> Any:
    """Return the object or the list that a text is as JSON; another value as it is."""
    with contextlib.suppress(TypeError, json.JSONDecodeError):
        decoded = json.loads(value)
        return decoded if isinstance(decoded, dict | list) else value
    return value


def _without_nulls(value: Any) -> Any:
    """Return a value of a table without the nulls in it, but with those of lists."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
