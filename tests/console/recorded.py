"""A console that answers from memory: the page's files and answers as the API gives them, without a server.

The time stands still at `NOW`, so that what the page shows is the same each day.
"""

import base64
import json
import math
import mimetypes
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import outbox_core

PAGE = Path(outbox_core.__file__).parent / "console" / "page"
BASE = "http://console.test/ops/outbox/"
"""The path below which it is mounted."""
NOW = datetime(2026, 11, 23, 14, 30, tzinfo=UTC)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'"
    "; manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HOSTILE = "<img src=x onerror=\"window.hacked='yes'\"><script>window.hacked='yes'</script>"
EXACT = '{"order": 12345678901234567890, "amount": 1.00, "a": 1, "a": 2, "items": [{"n": 1}, {}], "note": "caf\\u00e9"}'
TOO_LARGE = "2000071 bytes; this topic takes at most 1048588 (max.message.bytes)"
_POISON = "9007199254740993"  # a number that JavaScript cannot keep
_LEADER = "harvester-b"


def ago(**span: float) -> str:
    """Return the time so long before now."""
    return (NOW - timedelta(**span)).isoformat()


def value(text: str | bytes | None) -> dict[str, Any]:
    """Return a value as the API tells it."""
    content = text.encode() if isinstance(text, str) else text or b""
    kind = "tombstone" if text is None else "binary" if isinstance(text, bytes) else "text"
    if isinstance(text, str) and text.startswith("{"):
        kind = "json"
    encoded = base64.b64encode(content).decode() if kind == "binary" else None
    told = text if isinstance(text, str) else None
    return {"kind": kind, "text": told, "base64": encoded, "size_bytes": len(content), "is_cut": False}


def record(identity: str, topic: str, key: str | None, content: str | bytes | None, **other: Any) -> dict[str, Any]:
    """Return a pending record."""
    told = value(content)
    return {
        "id": identity,
        "topic": topic,
        "key": key,
        "partition": None,
        "create_time": ago(seconds=312),
        "age_seconds": 312.0,
        "is_marked": False,
        "size_bytes": told["size_bytes"],
        "value": told,
        "headers": [
            ["ce_type", value("order.placed")],
            ["traceparent", value(f"00-{'4bf92f35' * 4}-00f067aa0ba902b7-01")],
        ],
        "header_count": 2,
        "hold": None,
    } | other


def _records() -> list[dict[str, Any]]:
    hold = {"id": "-6917529027641081856", "what": "record", "cause": TOO_LARGE}
    pause = {"id": "5", "what": "topic", "cause": "ledger migration, ticket 812"}
    later = [str(int(_POISON) + number) for number in range(1, 12)]
    orders = [record(identity, "orders", f"customer-{4712 + n}", EXACT) for n, identity in enumerate(later[1:6])]
    refunds = [record(identity, "refunds", f"customer-{n}", EXACT, hold=pause) for n, identity in enumerate(later[6:8])]
    hostile = record(later[8], HOSTILE, HOSTILE, HOSTILE, headers=[[HOSTILE, value(HOSTILE)]])
    return [
        record(_POISON, "orders", "customer-4711", EXACT, hold=hold),
        record(later[0], "orders", "customer-4711", EXACT, hold=hold),
        *orders,
        *refunds,
        hostile,
        record(later[9], "documents", "k" * 300, bytes(range(48))),
        record(later[10], "documents", None, None),
    ]


def _curves(hours: float) -> dict[str, Any]:
    """Return statistics of a good day with a fall-over, and the backlog after it."""
    points = 240
    end = NOW.timestamp()
    step = hours * 3600 / points
    columns: dict[str, list[float | None]] = {"time": []}
    for number in range(points):
        part = number / points
        if 0.62 < part < 0.64:
            continue  # nobody leads
        behind = max(0.0, 1 - (part - 0.64) / 0.05) if part >= 0.64 else 0.0
        wave = math.sin(part * 9) + math.sin(number * 12.9898) * 0.12
        point = {
            "time": end - hours * 3600 + step * (number + 1),
            "published_per_second": 420 + 160 * wave + 500 * (behind > 0),
            "failed_per_second": 2.0 * (0.40 < part < 0.42),
            "bytes_per_second": (420 + 160 * wave) * 910,
            "deliverable": 24 + round(9 * abs(wave)) + round(4200 * behind),
            "deliverable_age": 0.35 + 0.1 * wave + 130 * behind,
            "held": 0 if part < 0.4 else round(67 * min(1.0, (part - 0.4) * 2)),
            "held_age": None,
            "latency_p50": 0.022 + 0.002 * wave,
            "latency_p99": 0.14 + 0.03 * wave + 0.6 * (behind > 0),
        }
        for name, number_of in point.items():
            columns.setdefault(name, []).append(number_of)
    return {"step_seconds": step, "from": end - hours * 3600, "to": end, "columns": columns}


def _status() -> dict[str, Any]:
    def topic(name: str, deliverable: int, held: int, age: float | None, held_age: float | None) -> dict[str, Any]:
        return {
            "topic": name,
            "waiting": deliverable + held,
            "deliverable": deliverable,
            "held": held,
            "marked": 0,
            "oldest_deliverable_seconds": age,
            "oldest_held_seconds": held_age,
            "has_keyless": False,
        }

    backlog = {
        "pending": 96,
        "is_estimate": False,
        "oldest_age_seconds": 312.0,
        "oldest_deliverable_seconds": 0.42,
        "oldest_held_seconds": 312.0,
        "held_at_head": 67,
        "head_rows": 10000,
        "topics": [
            topic("orders", 24, 17, 0.42, 312.0),
            topic("refunds", 0, 50, None, 122.0),
            topic("invoices", 5, 0, 0.1, None),
        ],
        "holds": {"records": 3, "keys": 0, "topics": ["refunds"]},
    }
    harvesters = [
        {"client_id": name, "host": "/10.0.0.3", "leads": name == _LEADER} for name in (_LEADER, "harvester-c")
    ]
    return {
        "outbox": "shop.public.outbox",
        "leader_group": "outbox.shop.public.outbox",
        "database": {"at": ago(), "unavailable": None, "data": backlog},
        "kafka": {"at": ago(), "unavailable": None, "data": {"harvesters": harvesters}},
    }


def _leadership(
    instance: str, term: int, begin: str | None, end: str | None, how: str | None = None, *, reason: str = ""
) -> dict[str, Any]:
    return {
        "instance": instance,
        "leader_id": str(term),
        "term": str(term),
        "from": begin,
        "to": end,
        "end": how,
        "reason": reason,
    }


def _timeline(hours: float) -> dict[str, Any]:
    lost = "the lease of 5 s ran out: no heartbeat was acknowledged (Local: Broker transport failure)"
    leaderships = [
        _leadership("harvester-a", 2014, None, ago(minutes=150), "handed_over"),
        _leadership("harvester-c", 2015, ago(minutes=149.9), ago(minutes=109), "fenced", reason=lost),
        _leadership("harvester-a", 2016, ago(minutes=108.8), ago(minutes=65.1), "unknown"),
        _leadership(_LEADER, 2017, ago(minutes=65), None),
    ]
    return {"from": ago(hours=hours), "to": ago(), "leaderships": leaderships, "marks": [], "is_cut": False}


def _cause(topic: str, what: str, cause: str, *, holds: int, waiting: int, since: str) -> dict[str, Any]:
    return {
        "topic": topic,
        "what": what,
        "cause": cause,
        "cause_pattern": cause,
        "holds": holds,
        "dead_letter_asked": 0,
        "since": since,
        "until": since,
        "waiting": waiting,
        "records": [_POISON] if what == "record" else [],
    }


def _hold(number: int) -> dict[str, Any]:
    return {
        "id": str(-6917529027641081856 + number),
        "what": "record",
        "topic": "orders",
        "key": f"customer-{4711 + number}",
        "record_id": str(int(_POISON) + number),
        "reason": "refused",
        "error": TOO_LARGE,
        "cause_pattern": TOO_LARGE,
        "dead_letter_asked": number == 2,
        "since": ago(minutes=52 - number),
        "waiting": 6,
    }


def _finding(subject: str, verdict: str, detail: str, remedy: str = "") -> dict[str, Any]:
    return {"subject": subject, "verdict": verdict, "detail": detail, "remedy": remedy, "unanswered": None}


def _event(number: int, kind: str, **other: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("leader_id", "term", "topic", "key", "record_id"))
    return {
        "id": str(number),
        "at": ago(minutes=7 * number + 2),
        "kind": kind,
        "actor": "alice@desk as shop_admin",
        "reason": "",
        **empty,
    } | other


_LETTER = {
    "partition": 0,
    "offset": "12",
    "at": ago(minutes=30),
    "record_id": "812",
    "original_topic": "orders",
    "original_partition": None,
    "error": TOO_LARGE,
    "key": "customer-9",
    "value": value(EXACT),
    "headers": [["ce_type", value("order.placed")]],
    "header_count": 1,
    "is_whole": True,
    "foreign_outbox": None,
    "size_bytes": len(EXACT),
    "restashed": None,
}

_FINDINGS = [
    _finding(
        "topic refunds",
        "problem",
        "min.insync.replicas is 1: an acknowledged record can be lost with one broker",
        "kafka-configs.sh --alter --topic refunds --add-config min.insync.replicas=2",
    ),
    _finding(
        "notices",
        "warning",
        "there is no trigger that notifies: the harvester looks at intervals",
        "make it with `outbox schema --apply --notify -f shop.yaml`",
    ),
    _finding("server", "ok", "PostgreSQL 18.4"),
    _finding("leader", "ok", f"{_LEADER} leads"),
]
_WRITER = {
    "transaction": "3/77",
    "who": "pid 123 (nightly-import)",
    "pid": 123,
    "state": "idle in transaction",
    "age_seconds": 64.2,
    "remedy": "SELECT pg_terminate_backend(123)",
}
_EVENTS = [
    _event(1, "held", topic="refunds", reason="ledger migration, ticket 812"),
    _event(2, "skipped", topic="orders", key="customer-9", record_id="812", reason="customer was merged"),
    _event(9, "leader_acquired", actor=_LEADER, term="2017", leader_id="d"),
]


class RecordedConsole:
    """The answers of a console. Tests change `session` and `answers`, and read what was posted from `posted`."""

    def __init__(self, permissions: tuple[str, ...] = ("view", "operate", "restash")) -> None:
        self.session: dict[str, Any] = {
            "version": "0",
            "user": {"name": "alice@desk", "permissions": list(permissions)},
            "login": None,
            "refusal": "",
            "csrf": {"header": "X-Outbox-Console", "token": "t"},
            "home": None,
        }
        self.answers: dict[str, Callable[[dict[str, str]], Any]] = {
            "status": lambda _: _status(),
            "statistics": lambda asked: _known(_curves(float(asked["hours"]))),
            "timeline": lambda asked: _known(_timeline(float(asked["hours"]))),
            "topics": lambda _: _known({"topics": [{"topic": one, "waiting": 9} for one in ("orders", "refunds")]}),
            "keys": lambda _: _known({"keys": [{"key": "customer-4711", "waiting": 3}]}),
            "records": _page_of_records,
            "holds": lambda _: _known({"causes": self.causes, "holds": 4, "is_cut": False, "head_rows": 10000}),
            "holds/list": lambda _: _known({"holds": [_hold(number) for number in range(3)], "is_cut": False}),
            "findings": lambda _: _known({"is_running": False, "at": ago(seconds=9), "findings": _FINDINGS}),
            "writers": lambda _: _known({"last_id": "4711", "unusable": "", "writers": [_WRITER]}),
            "dead-letters": lambda _: _known(
                {"dead_letter_topic": "shop.dead-letter", "letters": [_LETTER], "is_cut": False, "left_out": ""}
            ),
            "dead-letters/0/12": lambda _: _known(_LETTER),
            "events": _events,
        }
        self.answers |= {f"records/{one['id']}": lambda _, one=one: _known(one) for one in _records()}
        self.causes = [
            _cause("orders", "record", TOO_LARGE, holds=3, waiting=17, since=ago(minutes=52)),
            _cause("refunds", "topic", "ledger migration, ticket 812", holds=1, waiting=50, since=ago(minutes=2)),
            _cause(HOSTILE, "key", HOSTILE, holds=1, waiting=0, since=ago(minutes=1)),
        ]
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.is_down = False

    def answer(self, route: Any) -> None:
        """Answer a request of the browser: a handler for `context.route`."""
        if self.is_down:
            route.abort("connectionrefused")
            return
        address = urlsplit(route.request.url)
        path = address.path.removeprefix(urlsplit(BASE).path)
        if not path.startswith("api/"):
            file = PAGE / (path or "index.html")
            kind = mimetypes.guess_type(file.name)[0]
            route.fulfill(body=file.read_bytes(), headers={"Content-Type": kind, "Content-Security-Policy": POLICY})
            return
        status, told = self._told(route.request, unquote(path).removeprefix("api/"), dict(parse_qs(address.query)))
        route.fulfill(status=status, body=json.dumps(told), headers={"Content-Type": "application/json"})

    def _told(self, request: Any, path: str, query: dict[str, list[str]]) -> tuple[int, Any]:
        if path == "session":
            return 200, self.session
        if path == "outboxes":
            return 200, {
                "outboxes": [{"name": "shop", "table": "public.outbox"}, {"name": "billing", "table": "billing.outbox"}]
            }
        _, _, asked = path.split("/", 2)
        if request.method == "POST":
            body = request.post_data_json
            self.posted.append((asked.removeprefix("actions/"), body))
            done = "would release" if body.get("dry_run") else "released"
            return 200, {
                "action": "release",
                "dry_run": bool(body.get("dry_run")),
                "count": 3,
                "text": f"{done} 3 holds",
            }
        if asked not in self.answers:
            return 404, {"error": {"code": "not_found", "where": "", "message": f"there is no {asked}", "remedy": ""}}
        return 200, self.answers[asked]({name: values[0] for name, values in query.items()})


def _known(data: Any) -> dict[str, Any]:
    return {"data": data, "unavailable": None}


def _page_of_records(asked: dict[str, str]) -> dict[str, Any]:
    found = [one for one in _records() if asked.get("topic", one["topic"]) == one["topic"]]
    return _known({"records": found, "next_after": None, "is_end": True, "searched": 100000})


def _events(asked: dict[str, str]) -> dict[str, Any]:
    kinds = asked.get("kinds", "").split(",")
    found = [event for event in _EVENTS if kinds == [""] or event["kind"] in kinds]
    return _known({"events": found, "is_cut": False})
