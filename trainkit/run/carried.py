"""Which names a loop of a script carries from one turn to the next: it reads them, then sets them.

A temperature that falls, a counter of steps or the best accuracy so far is carried; a batch, which
is set before it is read, is not. The source of the script says so, as a value alone cannot.
"""

import ast
import linecache
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, singledispatchmethod
from pathlib import Path
from types import CodeType, FrameType

Loop = ast.For | ast.AsyncFor | ast.While
MAKERS = ast.Call | ast.Constant | ast.Dict | ast.List | ast.DictComp | ast.ListComp
RESETS = {"reset", "clear", "zero_", "fill_"}
CONSTANT = "repeat(", "itertools.repeat("
CLOCKS = {"time", "perf_counter", "monotonic", "process_time", "perf_counter_ns", "now"}


@dataclass(frozen=True)
class Carried:
    """Names, with those of attributes as in `self.tau`, and of what has entries as in `counts[]`.

    Attributes:
        by_steps: what the innermost loop around the place carries.
        by_others: what the loops around that one carry.
        temporary: what the innermost loop sets and none of them carries.
        anew: what only the loops around that one set, and none of them carries, or reset.
        made: what the function makes or resets outside of a loop, if one loop is around the place.
        drawn: what is given to next() in one of them.
        zipped: what the innermost loop goes through beside the batches of run.steps, as written.
        num_loops: how many loops are around the place.
    """

    by_steps: frozenset[str] = frozenset()
    by_others: frozenset[str] = frozenset()
    temporary: frozenset[str] = frozenset()
    anew: frozenset[str] = frozenset()
    made: frozenset[str] = frozenset()
    drawn: frozenset[str] = frozenset()
    zipped: tuple[str, ...] = ()
    num_loops: int = 0

    def all_carried(self) -> frozenset[str]:
        return self.by_steps | self.by_others


NOTHING = Carried()


def carried_by(frame: FrameType) -> Carried:
    """What the loops around the place carry where a function, or a script, is now.

    It is nothing where there is no source to read, or one that is nested too deeply for it.
    """
    return _carried_at(frame.f_code, frame.f_lineno or 0)


@lru_cache(maxsize=100)
def _carried_at(code: CodeType, line: int) -> Carried:
    try:
        statements = _statements_of(code)
        loops = _loops_around(statements, line)
        if not loops:
            return NOTHING
        return _carried_in(loops, statements, saved=_names_in_state(code.co_filename))
    except RecursionError:  # a chain of hundreds of elif, or a sum of a thousand terms
        return NOTHING


def _carried_in(
    loops: list[Loop], statements: Sequence[ast.stmt], saved: frozenset[str]
) -> Carried:
    flows = [_flow_of(loop) for loop in loops]
    carried = [flow.carried() - saved for flow in flows]
    others = frozenset[str]().union(*carried[:-1])
    stored = frozenset[str]().union(*(flow.stored for flow in flows))
    in_steps = frozenset(flows[-1].stored)
    drawn = frozenset(_names_drawn_in(loops[0])) - frozenset(_names_of_batches(loops[0]))
    others |= drawn - stored
    by_steps = (carried[-1] | drawn) - others
    anew = (stored - in_steps - others - by_steps) | frozenset(
        _names_reset_in([loops[0]], loops[-1])
    )
    made = [*_names_made_in(statements), *_names_reset_in(statements, loops[-1])]
    return Carried(
        by_steps,
        others,
        temporary=in_steps - others - by_steps,
        anew=anew,
        made=frozenset(made) if len(loops) == 1 else frozenset(),
        drawn=drawn,
        zipped=_zipped_with(loops[-1]),
        num_loops=len(loops),
    )


@lru_cache(maxsize=100)
def _names_in_state(file: str) -> frozenset[str]:
    """What a file puts into run.state, as written, and run.state by another name."""
    names: set[str] = set()
    tree = _parse(file)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Assign):
            if _is_state(node.value):
                names |= {f"{_dotted(target)}[]" for target in node.targets}
            if any(isinstance(to, ast.Subscript) and _is_state(to.value) for to in node.targets):
                names |= {_dotted(part) for part in ast.walk(node.value)}
    return frozenset(names)


def _is_state(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "state"


def _names_reset_in(statements: Iterable[ast.stmt], inner: Loop) -> Iterator[str]:
    """As `meter` in `meter.reset()`, outside of an inner loop."""
    within = set(ast.walk(inner))
    for node in (node for statement in statements for node in ast.walk(statement)):
        if node in within or not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in RESETS:
            yield _dotted(node.func.value)


def _names_drawn_in(loop: Loop) -> Iterator[str]:
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and _dotted(node.func) == "next" and node.args:
            yield _dotted(node.args[0])


def _names_of_batches(loop: Loop) -> Iterator[str]:
    """As `batches` in `batches = iter(run.steps(loader))`, which a checkpoint holds."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and ".steps(" in ast.unparse(node.value):
            yield from (_dotted(target) for target in node.targets)


def _names_made_in(statements: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, MAKERS):
            yield from (_dotted(target) for target in statement.targets)


def _zipped_with(loop: Loop) -> tuple[str, ...]:
    for node in () if isinstance(loop, ast.While) else ast.walk(loop.iter):
        if isinstance(node, ast.Call) and _dotted(node.func) == "zip":
            parts = [ast.unparse(part) for part in node.args]
            if any(".steps(" in part for part in parts):
                others = [part for part in parts if ".steps(" not in part]
                return tuple(part for part in others if not part.startswith(CONSTANT))
    return ()


@lru_cache(maxsize=100)
def kept_by_functions(file: str) -> tuple[frozenset[str], frozenset[str]]:
    """What functions of a file keep from one call to the next: names, and attributes of objects.

    They are names of `global` and `nonlocal` that a function sets, and attributes that it reads
    before it sets them.
    """
    names: set[str] = set()
    attributes: set[str] = set()
    tree = _parse(file)
    for function in ast.walk(tree) if tree else ():
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            flow = Flow()
            try:
                flow.run(function.body, set())
            except RecursionError:  # as above
                continue
            kept = flow.carried() - _names_in_state(file)
            attributes |= {name.partition(".")[2] for name in kept if "." in name}
            names |= _names_shared_by(function) & flow.stored
    return frozenset(names), frozenset(attributes)


def _names_shared_by(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {
        name
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Global | ast.Nonlocal)
        for name in node.names
    }


@lru_cache(maxsize=1)
def _parse(file: str) -> ast.Module | None:
    """The file as it was when it was first asked for; in a notebook, the cell."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # no Python, or it has changed into none since it was run


def is_as_written(code: CodeType) -> bool:
    """Is the file still as it was when this was compiled from it, or is it a cell of a notebook?"""
    file = code.co_filename
    return not Path(file).exists() or code in _compiled_from(file)


@lru_cache(maxsize=100)
def _compiled_from(file: str) -> frozenset[CodeType]:
    """The code of a file, and of all functions in it."""
    if _parse(file) is None:
        return frozenset()
    source = "".join(linecache.getlines(file))
    found, codes = set(), [compile(source, file, "exec", dont_inherit=True)]
    while codes:
        code = codes.pop()
        found.add(code)
        codes += [part for part in code.co_consts if isinstance(part, CodeType)]
    return frozenset(found)


@lru_cache(maxsize=100)
def _statements_of(code: CodeType) -> Sequence[ast.stmt]:
    """The body of the function, or of the module."""
    tree = _parse(code.co_filename) if is_as_written(code) else None
    if tree is None or code.co_name.startswith(("<module>", "<cell line")):
        return tree.body if tree else ()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            lines = [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
            if code.co_firstlineno == min(lines):
                return node.body
    return ()


def _loops_around(statements: Iterable[ast.stmt], line: int) -> list[Loop]:
    """The loops around a line, from the outermost, without those of functions defined there."""
    for statement in statements:
        if not statement.lineno <= line <= (statement.end_lineno or 0):
            continue
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return []
        inner = _loops_around(_blocks_of(statement), line)
        return [statement, *inner] if isinstance(statement, Loop) else inner
    return []


def _blocks_of(statement: ast.stmt) -> Iterator[ast.stmt]:
    """The statements within a statement."""
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.stmt):
            yield node
        elif isinstance(node, ast.ExceptHandler | ast.match_case):
            yield from node.body


def _flow_of(loop: Loop) -> "Flow":
    flow = Flow()
    if isinstance(loop, ast.While):
        flow.run([ast.copy_location(ast.Expr(loop.test), loop), *loop.body], set())
    else:
        flow.run(loop.body, flow.store(loop.target, set()))
    return flow


@dataclass
class Flow:
    """Goes through statements as they run, and notes what is read before it is certainly set.

    A `for` is taken to have one turn or more, so that what it leaves behind is set after it.

    Attributes:
        read: names that were read before.
        stored: names that are set anywhere.
        computed: those of them that are not only set to the time.
    """

    read: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    computed: set[str] = field(default_factory=set)

    def carried(self) -> frozenset[str]:
        return frozenset(self.read & self.computed)

    def run(self, statements: Iterable[ast.stmt], done: set[str]) -> set[str] | None:
        """Go through statements. done: what is set before. Return what is set after them.

        None: what follows them is not reached.
        """
        done = set(done)
        for statement in statements:
            after = self.after(statement, done)
            if after is None:
                return None
            done = after
        return done

    def see(self, node: ast.AST | None, done: set[str]) -> None:
        """Note what an expression reads; add to `done` what it sets."""
        if node is None:
            return
        if isinstance(getattr(node, "ctx", None), ast.Load):
            self._note_read(_dotted(node), done)
        if isinstance(node, ast.NamedExpr):
            self.see(node.value, done)
            done |= self.store(node.target, done)
        elif isinstance(node, ast.Lambda):
            self._see_within([node.body], _arguments(node), done)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            self.see(node.generators[0].iter, done)  # outside of the comprehension's own names
            own = {n.id for part in node.generators for n in _names_in(part.target)}
            self._see_within(ast.iter_child_nodes(node), own, done)
        else:
            for part in ast.iter_child_nodes(node):
                self.see(part, done)

    def store(self, target: ast.AST, done: set[str], value: ast.expr | None = None) -> set[str]:
        """Note what an assignment sets; return `done` with it."""
        done = set(done)
        is_time = self._is_time(value)  # before its own name is one that is set
        for node in ast.walk(target):
            name = _dotted(node)
            if not name or not isinstance(getattr(node, "ctx", None), ast.Store):
                if isinstance(node, ast.Name):
                    self.see(node, done)  # the object of an attribute, a list, an index
                continue
            self.stored.add(name)
            if not is_time:
                self.computed.add(name)
            done.add(name)
        return done

    def _is_time(self, value: ast.expr | None) -> bool:
        """Is this the time, or a duration?"""
        if isinstance(value, ast.BinOp):
            return self._is_time(value.left) or self._is_time(value.right)
        if isinstance(value, ast.Name):
            return value.id in self.stored - self.computed
        if not isinstance(value, ast.Call):
            return False
        called = value.func
        if isinstance(called, ast.Name):
            return called.id in CLOCKS
        return isinstance(called, ast.Attribute) and (
            called.attr in CLOCKS or self._is_time(called.value)
        )

    def _note_read(self, name: str, done: set[str]) -> None:
        """Note a name, unless it or the object that it is a part of is new."""
        object_of, _, _ = name.partition(".")
        new = {name, name.removesuffix("[]"), object_of.removesuffix("[]")} & done
        if name and not new:
            self.read.add(name)

    def _see_within(self, nodes: Iterable[ast.AST], own: set[str], done: set[str]) -> None:
        """Note what is read where some names are others'."""
        for node in nodes:
            self.see(node, done | own)

    @singledispatchmethod
    def after(self, statement: ast.AST, done: set[str]) -> set[str] | None:
        """Go through a statement; return what is set after it."""
        self.see(statement, done)
        return done

    @after.register
    def _(
        self, statement: ast.Return | ast.Raise | ast.Continue | ast.Break, done: set[str]
    ) -> None:
        self.see(statement, done)

    @after.register
    def _(self, statement: ast.Assign, done: set[str]) -> set[str]:
        self.see(statement.value, done)
        for target in statement.targets:
            done = self.store(target, done, statement.value)
        return done

    @after.register
    def _(self, statement: ast.AnnAssign, done: set[str]) -> set[str]:
        self.see(statement.value, done)
        return self.store(statement.target, done, statement.value) if statement.value else done

    @after.register
    def _(self, statement: ast.AugAssign, done: set[str]) -> set[str]:
        self._note_read(_dotted(statement.target), done)
        self.see(statement.value, done)
        return self.store(statement.target, done, statement.value)

    @after.register
    def _(self, statement: ast.For | ast.AsyncFor, done: set[str]) -> set[str]:
        self.see(statement.iter, done)
        start = self.store(statement.target, done)
        after = self.run(statement.body, start)
        rest = start if after is None else after
        return _joined(rest, self.run(statement.orelse, rest)) or rest

    @after.register
    def _(self, statement: ast.While, done: set[str]) -> set[str]:
        self.see(statement.test, done)
        self.run(statement.body, done)
        self.run(statement.orelse, done)
        return done

    @after.register
    def _(self, statement: ast.If, done: set[str]) -> set[str] | None:
        self.see(statement.test, done)
        return _joined(self.run(statement.body, done), self.run(statement.orelse, done))

    @after.register
    def _(self, statement: ast.With | ast.AsyncWith, done: set[str]) -> set[str] | None:
        for item in statement.items:
            self.see(item.context_expr, done)
            if item.optional_vars:
                done = self.store(item.optional_vars, done)
        return self.run(statement.body, done)

    @after.register
    def _(self, statement: ast.Try | ast.TryStar, done: set[str]) -> set[str] | None:
        after = self.run([*statement.body, *statement.orelse], done)
        for handler in statement.handlers:
            own = done | {handler.name} if handler.name else done
            after = _joined(after, self.run(handler.body, own))
        last = self.run(statement.finalbody, done if after is None else after)
        return None if after is None else last

    @after.register
    def _(self, statement: ast.Match, done: set[str]) -> set[str] | None:
        self.see(statement.subject, done)
        after: set[str] | None = None
        for case in statement.cases:
            parts = [
                node
                for node in ast.walk(case.pattern)
                if isinstance(node, ast.MatchAs | ast.MatchStar)
            ]
            own = done | {part.name for part in parts if part.name}
            self.see(case.guard, own)
            after = _joined(after, self.run(case.body, own))
            if isinstance(case.pattern, ast.MatchAs) and not (case.pattern.pattern or case.guard):
                return after  # as `case _`
        return _joined(after, done)

    @after.register
    def _(self, statement: ast.FunctionDef | ast.AsyncFunctionDef, done: set[str]) -> set[str]:
        names = [name for part in statement.body for name in _names_in(part)]
        own = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        self._see_within(statement.body, own | _arguments(statement), done)
        return done | {statement.name}


def _joined(one: set[str] | None, other: set[str] | None) -> set[str] | None:
    """What is set after one of two ways, of which one may lead elsewhere."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _dotted(node: ast.AST) -> str:
    """`tau`, `self.tau`, `counts[]` and `self.counts[]`, and "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name | ast.Attribute):
        name = _dotted(node.value)
        return f"{name}[]" if name else ""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return ""


def _names_in(node: ast.AST) -> Iterator[ast.Name]:
    return (part for part in ast.walk(node) if isinstance(part, ast.Name))


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    return {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}
