"""The calls in the product's source that may wait for somebody else, found in its syntax trees.

A call is of interest by its name: a statement, a wait for a thread, a request to Kafka, a socket. It needs no entry in
`blocking_calls.toml` if it says itself how long it waits, by an argument that cannot be None.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[3]
PACKAGES = ("outbox_core", "outbox_django", "outbox_queue", "outbox_spark", "outbox_sqlalchemy")

_DATABASE = {"execute", "executemany", "rollback", "connect", "stream", "ensure_connection", "atomic"}
_THREADS = {
    "result",
    "join",
    "wait",
    "acquire",
    "get",
    "put",
    "shutdown",
    "wait_for",
    "as_completed",
    "sigwait",
    "serve_forever",
}
_KAFKA = {
    "poll", "consume", "flush", "list_topics", "commit", "init_transactions", "commit_transaction", "abort_transaction",
    "send_offsets_to_transaction", "committed", "get_watermark_offsets", "offsets_for_times",
}  # fmt: skip
_SOCKETS = {"recv", "recv_into", "sendall", "create_connection", "urlopen", "getaddrinfo"}
_PROCESSES = {"Popen", "communicate", "check_output", "check_call", "input", "readline"}
_SPARK = {"awaitTermination", "collect", "toLocalIterator", "processAllAvailable", "toPandas"}
NAMES = _DATABASE | _THREADS | _KAFKA | _SOCKETS | _PROCESSES | _SPARK

# The number of positional arguments with which the last one is the time that a call waits at most.
_TIMED = {"result": 1, "join": 1, "wait": 1, "poll": 1, "flush": 1, "commit_transaction": 1, "consume": 2,
          "committed": 2, "abort_transaction": 1, "init_transactions": 1, "list_topics": 2, "wait_for": 2,
          "get_watermark_offsets": 2, "send_offsets_to_transaction": 3}  # fmt: skip
_TIMEOUTS = {"timeout", "timeout_seconds", "request_timeout", "operation_timeout", "connect_timeout"}
# Of texts, dictionaries and the like: calls with these numbers of arguments wait for nobody.
_HARMLESS = {"join": {1, 2}, "get": {1, 2}}
_NO_WAIT = {"block", "blocking"}  # of False
_CLIENTS = ("consumer", "producer", "admin", "client")
_POOLS = ("pool", "thread", "executor")
_STORES = ("filesystem",)
_FUNCTIONS = {"connect", "urlopen", "create_connection", "input", "Popen"}
_LOCKS = ("lock", "condition", "mutex", "changed")


class Call(NamedTuple):
    """A call: the file, the class and function around it, and its text without arguments."""

    path: str
    function: str
    callee: str
    line: int

    @property
    def place(self) -> str:
        """The call as entries name it: `path function callee`."""
        return f"{self.path} {self.function} {self.callee}"


@cache
def blocking_calls() -> tuple[Call, ...]:
    """Return the calls of the product that may wait and do not say for how long."""
    files = [path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))]
    return tuple(call for path in files for call in calls_of(path.read_text(), str(path.relative_to(REPOSITORY))))


def calls_of(source: str, path: str) -> Iterator[Call]:
    """Yield those of one module."""
    visitor = _Visitor(path)
    visitor.visit(ast.parse(source))
    yield from visitor.found


class _Visitor(ast.NodeVisitor):
    def __init__(self, path: str) -> None:
        self.found: list[Call] = []
        self._path = path
        self._scopes: list[str] = []
        self._may_be_none: list[set[str]] = [set()]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        given = node.args
        parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        optional = {one.arg for one in parameters if one.annotation and "None" in ast.unparse(one.annotation)}
        self._scopes.append(node.name)
        self._may_be_none.append(optional)
        self.generic_visit(node)
        self._may_be_none.pop()
        self._scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  as ast names it

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            text = ast.unparse(item.context_expr)
            if "PoolExecutor" in text:
                self._add(text.partition("(")[0], node.lineno)  # its end waits for the threads
            if text.lower().endswith(_LOCKS) and any(map(_may_wait, _calls_in(node.body))):
                self._add(f"with {text}", node.lineno)  # a lock that is held while another waits
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _may_wait(node) and not self._is_timed(node):
            self._add(ast.unparse(node.func), node.lineno)
        self.generic_visit(node)

    def _add(self, callee: str, line: int) -> None:
        callee = "".join(callee.split())
        self.found.append(Call(self._path, ".".join(self._scopes) or "<module>", callee[-60:], line))

    def _is_timed(self, node: ast.Call) -> bool:
        if any(keyword.arg in _NO_WAIT and ast.unparse(keyword.value) == "False" for keyword in node.keywords):
            return True
        times = [keyword.value for keyword in node.keywords if keyword.arg in _TIMEOUTS]
        number = _TIMED.get(_name_of(node))
        if number is not None and len(node.args) == number:
            times.append(node.args[-1])
        return any(not self._is_none(time) for time in times)

    def _is_none(self, time: ast.expr) -> bool:
        if isinstance(time, ast.Constant):
            return time.value is None
        if isinstance(time, ast.IfExp):
            return self._is_none(time.body) or self._is_none(time.orelse)
        return isinstance(time, ast.Name) and time.id in self._may_be_none[-1]


def _calls_in(body: list[ast.stmt]) -> Iterator[ast.Call]:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                yield node


def _name_of(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _receiver_of(node: ast.Call) -> str:
    """Return the last name of what the call is a method of, in lower case: `filesystem` of `self._filesystem.find`."""
    value = getattr(node.func, "value", None)
    return str(getattr(value, "attr", None) or getattr(value, "id", "")).lower()


def _may_wait(node: ast.Call) -> bool:
    name, receiver = _name_of(node), _receiver_of(node)
    if receiver == "subprocess" and name in {"run", "call"}:
        return True
    if name == "close":
        return receiver.endswith(_CLIENTS)
    if receiver.endswith(_STORES):
        return True
    if name in {"flush", "committed", "shutdown"} and not receiver.endswith((*_CLIENTS, *_POOLS)):
        return False
    if name not in NAMES or (len(node.args) in _HARMLESS.get(name, set()) and not node.keywords):
        return False
    return isinstance(node.func, ast.Attribute) or name in _FUNCTIONS
