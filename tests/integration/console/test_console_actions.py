"""The console's actions: each one, with a reason and a trace, and nothing for those who may not."""

import json

import pytest

from outbox_core.console import Permission, User
from outbox_core.record import OutboxRecord
from tests.integration.console.console_fixtures import HOST, Browser, asking, browser, console, scene

__all__ = ["browser", "console", "scene"]


@pytest.fixture
def held(scene):
    """Hold records 1 to 4 of orders, for two causes, and pause refunds."""
    scene.fill("orders", 8, keys=8)
    for record, reason in ((1, "too large: 5"), (2, "too large: 7"), (3, "no topic"), (4, "no topic")):
        scene.hold("add_record", record, reason=reason)
    scene.hold("add", "refunds", reason="paused")


def records_held(scene):
    """Return the ids of the held records."""
    return sorted(hold.record_id for hold in scene.held() if hold.record_id is not None)


@pytest.mark.usefixtures("held")
def test_release(scene, browser):
    """Holds are released by their ids, by records, and all that match; a dry run counts and changes nothing."""
    ids = [str(hold.id) for hold in scene.held() if hold.topic == "refunds"]
    like = {"matching": {"topic": "orders", "cause_pattern": "too large: #"}}
    status, document = browser.act("release", {"select": like, "dry_run": True})
    assert (status, document["count"], document["text"]) == (200, 2, "would have released 2 holds")
    assert records_held(scene) == [1, 2, 3, 4]
    assert browser.done("release", select=like) == 2
    assert browser.done("release", select=like) == 0, "repeated, it does nothing"
    assert browser.done("release", select={"records": ["3"]}) == 1
    assert browser.done("release", select={"holds": ids}) == 1
    assert records_held(scene) == [4]
    assert browser.done("release", select={"matching": {}}) == 1
    assert scene.held() == []


@pytest.mark.usefixtures("held")
def test_skip(scene, browser):
    """Skipped records are deleted, by record, by hold and by cause; paused topics stay."""
    ids = {hold.record_id: str(hold.id) for hold in scene.held()}
    assert browser.done("skip", select={"records": [1]}) == 1
    assert browser.done("skip", select={"holds": [ids[2], ids[None]]}) == 1
    assert browser.act("skip", {"select": {"matching": {}}, "dry_run": True})[1]["count"] == 2
    assert browser.done("skip", select={"matching": {"cause_pattern": "no topic"}}) == 2
    assert [row.id for row in scene.rows()] == [5, 6, 7, 8]
    assert [hold.topic for hold in scene.held()] == ["refunds"]


@pytest.mark.usefixtures("held")
def test_dead_letter(scene, browser):
    """Held records are asked for, once each."""
    assert browser.done("dead-letter", select={"matching": {"topic": "orders", "key": "k1"}}) == 1
    assert browser.done("dead-letter", select={"records": ["1", "2"]}) == 1
    assert sorted(hold.record_id for hold in scene.held() if hold.dead_letter) == [1, 2]


def test_pause_and_resume(scene, browser):
    """A topic and a key are paused and resumed; records of them that are held stay held."""
    scene.fill("orders", 2, keys=1)
    assert browser.done("pause", topic="orders") == 1
    assert browser.done("pause", topic="orders") == 0, "it was paused already"
    assert browser.done("pause", topic="orders", key="k0") == 1
    assert browser.done("pause", record="1") == 1
    assert browser.done("resume", topic="orders", key="k0") == 1
    assert browser.done("resume", topic="orders") == 1
    assert records_held(scene) == [1]
    assert browser.act("pause", {"record": "99", "reason": "r"})[1]["error"]["code"] == "cannot"


def test_a_pause_is_for_what_waits(scene, browser):
    """A topic or key that no record waits for is not paused unless that is meant, and a near name is proposed."""
    scene.fill("orders", 2, keys=1)
    status, document = browser.act("pause", {"topic": "ordrs", "reason": "r"})
    assert (status, document["error"]["code"]) == (409, "unknown_target")
    assert document["error"]["suggestions"] == ["orders"]
    assert browser.act("pause", {"topic": "orders", "key": "z", "reason": "r"})[0] == 409
    assert browser.act("pause", {"topic": "a b", "reason": "r"})[0] == 400
    assert scene.held() == []
    assert browser.done("pause", topic="ordrs", force=True) == 1


@pytest.mark.usefixtures("held")
def test_actions_leave_a_trace(browser):
    """The history has each action with the user, the role and the reason."""
    browser.done("release", select={"records": ["1"]}, reason="the topic takes 2 MB now")
    browser.done("skip", select={"records": ["2"]}, reason="a test")
    browser.done("pause", topic="orders", reason="the consumer is down")
    events = browser.data("events", "limit=3")["events"]
    assert [(event["kind"], event["record_id"], event["reason"]) for event in events] == [
        ("held", None, "the consumer is down"),
        ("skipped", "2", "a test"),
        ("released", "1", "the topic takes 2 MB now"),
    ]
    assert {event["actor"] for event in events} == {"alice as postgres"}


SELECTED = {"reason": "r", "select": {"records": ["1"]}}
BAD_BODIES = (
    ("release", {"select": {"records": ["1"]}}, 400, "body.reason"),
    ("release", {"reason": "  ", "select": {"records": ["1"]}}, 400, "body.reason"),
    ("release", {"reason": "x" * 501, "select": {"records": ["1"]}}, 400, "body.reason"),
    ("release", {"reason": "\0", "select": {"records": ["1"]}}, 400, "body.reason"),
    ("release", {"reason": "\ud800", "select": {"records": ["1"]}}, 400, "body.reason"),
    ("release", {"reason": "r"}, 400, "body.select"),
    ("release", {"reason": "r", "select": []}, 400, "body.select"),
    ("release", {"reason": "r", "select": {}}, 400, "body.select"),
    ("release", {"reason": "r", "select": {"records": []}}, 400, "body.select.records"),
    ("release", {"reason": "r", "select": {"records": ["1"], "matching": {}}}, 400, "body.select"),
    ("release", {"reason": "r", "select": {"records": ["1; DROP"]}}, 400, "body.select.records[0]"),
    ("release", {"reason": "r", "select": {"records": [True]}}, 400, "body.select.records[0]"),
    ("release", {"reason": "r", "select": {"records": [2**63]}}, 400, "body.select.records[0]"),
    ("skip", {"reason": "r", "select": {"matching": {"topc": "orders"}}}, 400, "body.select.matching.topc"),
    ("skip", {"reason": "r", "select": {"matching": {"key": "k"}}}, 400, "body.select.matching.key"),
    ("skip", {**SELECTED, "dryrun": True}, 400, "body.dryrun"),
    ("skip", {**SELECTED, "dry_run": "yes"}, 400, "body.dry_run"),
    ("pause", {"reason": "r"}, 400, "body.topic"),
    ("pause", {"reason": "r", "topic": 5}, 400, "body.topic"),
    ("pause", {"reason": "r", "topic": "orders", "record": "1"}, 400, "body.topic"),
    ("resume", {"reason": "r"}, 400, "body.topic"),
    ("restash", {"reason": "r", "record": {"topic": "t"}}, 400, "body.letter"),
    ("restash", {"reason": "r", "letter": {"partition": 0, "offset": "1"}}, 400, "body.record"),
    ("explode", {"reason": "r"}, 404, ""),
    ("release", [], 415, "body"),
    ("release", b"{", 415, "body"),
    ("release", b"[" * 100_000, 415, "body"),
    ("release", b" " * (5 * 2**20 + 1), 413, "body"),
)


@pytest.mark.usefixtures("held")
def test_bad_bodies_change_nothing(scene, browser):
    """Each body that cannot be used is refused, and the error says where it is wrong."""
    for action, body, status, where in BAD_BODIES:
        answered, document = browser.act(action, body)
        shown = json.dumps(body)[:200] if isinstance(body, dict) else body[:20]
        assert (answered, document["error"]["where"]) == (status, where), (action, shown, document)
        assert document["error"]["message"]
    assert records_held(scene) == [1, 2, 3, 4]
    assert len(scene.rows()) == 8


RECORD = {"topic": "orders", "key": "k", "value": {"text": "v"}}
BAD_RECORDS = (
    ({"topic": "__consumer_offsets"}, "body.record.topic"),
    ({"topic": ""}, "body.record.topic"),
    ({"key": 5}, "body.record.key"),
    ({"key": "k" * 65_537}, "body.record.key"),
    ({"partition": -1}, "body.record.partition"),
    ({"value": "v"}, "body.record.value"),
    ({"value": {"base64": "?"}}, "body.record.value"),
    ({"value": {"text": "v", "base64": ""}}, "body.record.value"),
    ({"headers": {}}, "body.record.headers"),
    ({"headers": [["a"]]}, "body.record.headers[0]"),
    ({"headers": [["a", "v"]]}, "body.record.headers[0]"),
    ({"headers": [["a\0", None]]}, "body.record.headers[0]"),
    ({"serializer": "x"}, "body.record.serializer"),
)


def test_bad_records_are_not_stashed(browser):
    """An edited dead letter is checked as a stash is, and each error names the field."""
    for change, where in BAD_RECORDS:
        body = {"reason": "r", "letter": {"partition": 0, "offset": "0"}, "record": {**RECORD, **change}}
        status, document = browser.act("restash", body)
        assert (status, document["error"]["where"]) == (400, where), document


BAD_QUERIES = (
    ("records", "limit=0", "query.limit"),
    ("records", "limit=201", "query.limit"),
    ("records", "after=x", "query.after"),
    ("records", "id=1.5", "query.id"),
    ("records", "topik=orders", "query.topik"),
    ("records", "topic=a&topic=b", "query"),
    ("records", "topic=%FF", "query"),
    ("records", "key=%00", "query.key"),
    ("records", "header_value=x", "query"),
    ("records/x", "", "path.id"),
    ("statistics", "hours=0", "query.hours"),
    ("statistics", "hours=nan", "query.hours"),
    ("events", "kinds=held,nothing", "query.kinds"),
    ("events", "limit=1001", "query.limit"),
    ("keys", "", "query.topic"),
    ("holds/list", "what=all", "query.what"),
    ("holds/list", "key=k", "query"),
    ("status", "x=1", "query.x"),
    ("dead-letters", "limit=999", "query.limit"),
    ("dead-letters/0/x", "", "path.offset"),
)


def test_bad_queries(browser):
    """Each parameter that cannot be used is refused, and the error says which it is."""
    for path, query, where in BAD_QUERIES:
        status, document = browser.get(path, query)
        assert (status, document.get("error", {}).get("where")) == (400, where), (path, query, document)


def test_what_is_not_there(browser):
    """Unknown outboxes, routes, actions and files are 404; the outboxes that are there are named."""
    for path in ("/api/outboxes/none/status", "/api/outboxes/shop/none", "/api/nothing", "/none.js", "/../console.py"):
        assert browser.request("GET", path)[0] == 404, path
    assert "shop" in browser.request("GET", "/api/outboxes/none/status")[1]["error"]["message"]


PERMITTED = (("view", set()), ("operate", {"skip", "pause"}), ("restash", {"restash"}))


@pytest.mark.parametrize(("permission", "allowed"), PERMITTED)
@pytest.mark.usefixtures("held")
def test_permissions(scene, console, permission, allowed):
    """A user without a permission is refused the actions that need it, and nothing is done."""
    browser = Browser(asking(console, User("bob", {Permission.VIEW, permission})))
    bodies = {"skip": SELECTED, "pause": {"reason": "r", "topic": "orders"}, "restash": {"reason": "r"}}
    for action, body in bodies.items():
        status, document = browser.act(action, body)
        if action in allowed:
            assert status in (200, 400)
        else:
            assert (status, document["error"]["code"]) == (403, "no_permission")
    assert records_held(scene) == ([2, 3, 4] if "skip" in allowed else [1, 2, 3, 4])
    assert browser.request("GET", "/api/session")[1]["user"]["permissions"] == sorted(
        {"view", permission}, reverse=True
    )


def test_nobody_gets_nothing(console):
    """Without a user, or without the permission to view, only the session is answered."""
    for user in (None, User("eve", frozenset())):
        browser = Browser(asking(console, user))
        assert browser.get("status")[0] == 403
        assert browser.request("GET", "/")[0] == 403
        assert browser.act("skip", SELECTED)[0] == 403
        assert browser.request("GET", "/api/outboxes")[0] == 403
        assert browser.request("GET", "/api/session")[0] == 200


FORGED = (
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": f"https://{HOST}.evil.example"},
    {"origin": f"https://{HOST.partition(':')[0]}:444"},
    {"origin": "", "sec-fetch-site": ""},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"x-outbox-console": ""},
    {"x-outbox-console": "a" * 32},
)


def test_questions_of_other_sites(browser):
    """A page of another site cannot read an answer, and cannot make the console work for one either."""
    for site, status in (("cross-site", 403), ("same-origin", 200), ("none", 200)):
        assert browser.request("GET", "/api/outboxes", headers={"sec-fetch-site": site})[0] == status, site


@pytest.mark.usefixtures("held")
def test_forged_posts(scene, browser):
    """A POST of another origin, or without the cookie's value in the header, is refused; nothing is done."""
    for headers in FORGED:
        status, document = browser.act("skip", SELECTED, **headers)
        assert (status, document["error"]["code"]) == (403, "forged"), headers
    headers = browser.post_headers()
    browser.cookies.clear()
    assert browser.request("POST", "/api/outboxes/shop/actions/skip", body=SELECTED, headers=headers)[0] == 403
    headers = browser.post_headers()
    form = {**headers, "content-type": "text/plain"}
    assert browser.request("POST", "/api/outboxes/shop/actions/skip", body=SELECTED, headers=form)[0] == 415
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        assert browser.request(method, "/api/outboxes/shop/actions/skip", body=SELECTED, headers=headers)[0] == 405
    assert browser.request("POST", "/api/outboxes/shop/status", body=SELECTED, headers=headers)[0] == 405
    assert records_held(scene) == [1, 2, 3, 4]
    assert browser.act("skip", SELECTED, **{"sec-fetch-site": "same-origin", "origin": ""})[0] == 200
    assert records_held(scene) == [2, 3, 4]


def test_headers_keep_the_page_to_itself(browser):
    """Every answer forbids frames, foreign sources and guesses at its type; answers of the API are not kept."""
    for path in ("/", "/api/session", "/api/outboxes", "/none"):
        browser.request("GET", path)
        told = browser.last_headers
        assert "default-src 'none'" in told["content-security-policy"]
        assert "unsafe" not in told["content-security-policy"]
        assert "frame-ancestors 'none'" in told["content-security-policy"]
        assert told["x-content-type-options"] == "nosniff"
        assert told["referrer-policy"] == "no-referrer"
        assert path == "/" or told["cache-control"] == "no-store"


def test_a_held_record_that_was_published_meanwhile(scene, browser):
    """An action that comes too late does nothing, and says so by its count."""
    scene.stash(OutboxRecord("orders", "k", b"v"))
    scene.hold("add_record", 1)
    scene.execute("DELETE FROM outbox")
    assert browser.done("skip", select={"records": ["1"]}) == 0
    assert scene.held() == []
