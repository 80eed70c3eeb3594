"""The sights of an outbox in the console, and how little is read for them."""

import psycopg
import pytest

from outbox_core.console import Console, User, reading
from outbox_core.console.access import EVERYTHING
from outbox_core.record import OutboxRecord
from outbox_core.schema import EventKind
from outbox_core.stores.interface import Backlog, NewEvent, NewStatistics, WaitingRows
from outbox_core.stores.postgres.store import PostgresStore
from tests.harvesting import wait_until
from tests.integration.console.console_fixtures import Browser, asking, browser, console, scene, small_bounds

__all__ = ["browser", "console", "scene"]

ROUTES = (
    "records",
    "records?topic=rare",
    "records?header=none&header_value=x",
    "topics",
    "keys?topic=orders",
    "holds",
    "holds/list",
    "events",
    "timeline",
    "statistics",
    "writers",
    "status",
)
EXACT = '{"b": 1.0, "a": 12345678901234567890, "b": 2e400, "ü": "\\u00fc"}'


def test_records_are_found(scene, browser):
    """Records are found by topic, key, id, header and its value; each says which hold keeps it."""
    scene.stash(
        OutboxRecord("orders", "k1", b"v", {"trace": "a"}),
        OutboxRecord("orders", "k2", b"v", {"trace": "b", "x": None}),
        OutboxRecord("refunds", "k1", b"v", partition=3),
    )
    scene.hold("add_record", 1, reason="bad")
    scene.hold("add", "refunds", reason="paused")

    def ids(query):
        return [record["id"] for record in browser.data("records", query)["records"]]

    assert ids("") == ["1", "2", "3"]
    assert ids("topic=orders&key=k2") == ["2"]
    assert ids("id=3") == ["3"]
    assert ids("header=x") == ["2"]
    assert ids("header=trace&header_value=a") == ["1"]
    assert ids("header=trace&header_value=c") == []
    assert ids("after=1&limit=1") == ["2"]
    found = browser.data("records")["records"]
    assert [record["hold"] and (record["hold"]["what"], record["hold"]["cause"]) for record in found] == [
        ("record", "bad"),
        None,
        ("topic", "paused"),
    ]
    assert found[2]["partition"] == 3


def test_values_are_shown_as_they_are(scene, browser):
    """JSON is the stored text to the last digit, what is no text is base64, and a tombstone is none of them."""
    values = (EXACT, "plain", b"\xff\x00", None, "NaN", "")
    scene.stash(*(OutboxRecord("orders", "k", value) for value in values))
    shown = [browser.data(f"records/{number + 1}")["value"] for number in range(len(values))]
    assert [value["kind"] for value in shown] == ["json", "text", "binary", "tombstone", "text", "text"]
    assert shown[0]["text"] == EXACT
    assert shown[2]["base64"] == "/wA="
    status, saved = browser.get("records/3/value")
    assert (status, saved) == (200, b"\xff\x00")
    assert browser.last_headers["content-disposition"] == 'attachment; filename="record-3.bin"'


def test_a_value_is_saved_whole_or_not_at_all(scene, browser, monkeypatch):
    """A value that is larger than what is saved is refused, with its size."""
    scene.stash(OutboxRecord("orders", "k", b"12345678"))
    monkeypatch.setattr(reading, "_DOWNLOAD_BYTES", 8)
    assert browser.get("records/1/value") == (200, b"12345678")
    monkeypatch.setattr(reading, "_DOWNLOAD_BYTES", 7)
    status, refused = browser.get("records/1/value")
    assert (status, refused["error"]["code"]) == (413, "too_large")
    assert "the value has 8 bytes, and the console saves at most 7" in refused["error"]["message"]


def test_long_values_are_cut_between_characters(scene, browser):
    """A list shows the beginning of a long value, without half a character; one record has it whole."""
    scene.stash(OutboxRecord("orders", "k", "ü" * 5000, {"long": "y" * 900}))
    (listed,) = browser.data("records")["records"]
    assert listed["value"] == {
        "kind": "text",
        "text": "ü" * 200,
        "base64": None,
        "size_bytes": 10_000,
        "is_cut": True,
    }
    assert len(listed["headers"][0][1]["text"]) == 400
    whole = browser.data("records/1")
    assert whole["value"]["text"] == "ü" * 5000
    assert whole["headers"][0][1]["text"] == "y" * 900


def test_a_record_that_is_gone(browser):
    """A record that is published is not found, which is said."""
    status, document = browser.get("records/77")
    assert (status, document["error"]["code"]) == (404, "not_found")
    assert "it is published" in document["error"]["message"]


def test_a_search_goes_on(scene, browser, monkeypatch):
    """A search that found nothing within its bound says where to go on, and at the table's end that it is there."""
    scene.fill("orders", 25)
    scene.stash(OutboxRecord("rare", "k", b"v"))
    with small_bounds(monkeypatch, 10):
        places, after = [], ""
        while after is not None:
            page = browser.data("records", f"topic=rare&after={after}")
            places.append((after, [record["id"] for record in page["records"]]))
            after = page["next_after"]
        assert places == [("", []), ("10", []), ("20", ["26"])]


def test_no_route_reads_more_than_its_bound(scene, browser, monkeypatch):
    """However many rows wait, each route reads the same few from the table."""
    scene.fill("orders", 3000)
    scene.execute("ANALYZE outbox")
    bound = 100
    with small_bounds(monkeypatch, bound):
        for route in ROUTES:
            before = _rows_read(scene)
            path, _, query = route.partition("?")
            assert browser.get(path, query)[0] == 200
            # A statement for the page, one for the search's end, and so on: some statements, each within the bound.
            assert _rows_read(scene) - before <= 6 * bound, route


def _rows_read(scene):
    """Return the rows of the outbox that were ever read; sessions report when they end."""
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'kafka-outbox%'"
    sessions += " AND datname = current_database()"
    wait_until(lambda: scene.execute(sessions)[0].count == 0, "sessions have not ended")
    (row,) = scene.execute(
        "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) AS n FROM pg_stat_user_tables"
        " WHERE relname = 'outbox'"
    )
    return row.n


def test_status_has_two_halves(scene, browser):
    """The database's half is there while Kafka's is not, and says how much is held."""
    scene.fill("orders", 5)
    scene.fill("refunds", 2)
    scene.hold("add", "refunds")
    status, document = browser.get("status")
    assert status == 200
    database = document["database"]["data"]
    assert (database["pending"], database["held_at_head"]) == (7, 2)
    assert [(topic["topic"], topic["deliverable"], topic["held"]) for topic in database["topics"]] == [
        ("orders", 5, 0),
        ("refunds", 0, 2),
    ]
    assert database["holds"] == {"records": 0, "keys": 0, "topics": ["refunds"]}
    wait_until(lambda: browser.get("status")[1]["kafka"]["at"], "Kafka's half was never read")
    kafka = browser.get("status")[1]["kafka"]
    assert kafka["data"] is None
    assert kafka["unavailable"]["service"] == "kafka"


def test_choices(scene, browser):
    """Topics are those that wait, are paused or were in events; keys those that wait, by their beginning."""
    scene.fill("orders", 6, keys=2, prefix="cust-")
    scene.hold("add", "idle")
    scene.hold("add", "orders", "cust-1")
    scene.hold("add", "was")
    scene.hold("release", topic="was")
    topics = browser.data("topics")["topics"]
    assert [(one["topic"], one["waiting"], one["held"], one["is_paused"]) for one in topics] == [
        ("orders", 6, 3, False),
        ("idle", 0, 0, True),
        ("was", 0, 0, False),
    ]
    keys = browser.data("keys", "topic=orders&starts=cust-")["keys"]
    assert [(one["key"], one["waiting"], one["is_paused"]) for one in keys] == [
        ("cust-0", 3, False),
        ("cust-1", 3, True),
    ]


def test_holds_are_grouped_by_cause(scene, browser):
    """Holds with the same cause but for its numbers are one group, with what waits behind them."""
    scene.fill("orders", 6, keys=3)
    scene.hold("add_record", 1, reason="too large: 17 bytes")
    scene.hold("add_record", 2, reason="too large: 4 bytes")
    scene.hold("add", "refunds", reason="paused")
    document = browser.data("holds")
    found = [
        (one["topic"], one["what"], one["cause_pattern"], one["holds"], one["waiting"]) for one in document["causes"]
    ]
    assert found == [("orders", "record", "too large: # bytes", 2, 4), ("refunds", "topic", "paused", 1, 0)]
    assert document["causes"][0]["records"] == ["1", "2"]
    assert document["holds"] == 3
    listed = browser.data("holds/list", "cause_pattern=too+large:+%23+bytes")["holds"]
    assert [(hold["record_id"], hold["waiting"]) for hold in listed] == [("1", 2), ("2", 2)]
    assert [hold["topic"] for hold in browser.data("holds/list", "what=topic")["holds"]] == ["refunds"]
    assert browser.data("holds/list", "limit=1")["is_cut"]


def test_history(scene, browser):
    """Statistics come in columns, thinned; leaderships with what ended them; events by kind."""
    store = PostgresStore(scene.database, application_name="kafka-outbox h1")
    leader = "11111111-1111-1111-1111-111111111111"
    for kind, age, term in ((EventKind.LEADER_ACQUIRED, 60.0, 7), (EventKind.LEADER_FENCED, 30.0, None)):
        store.history.add_events([NewEvent(kind, "h1", age, "no heartbeat" if term is None else "", leader, term)])
    store.history.add_events([NewEvent(EventKind.LEADER_ACQUIRED, "h2", 10.0, "", None, 8)])
    backlog = Backlog(WaitingRows(7, 1.5), WaitingRows(3, 90.0))
    for _ in range(3):
        store.history.add_statistics(NewStatistics("h1", 10.0, 500, 2, 64_000, backlog, 0.01, 0.2))
    store.close()
    scene.execute("UPDATE outbox_statistics SET create_time = now() - id * interval '1 hour'")
    scene.hold("add", "orders")
    columns = browser.data("statistics", "hours=24")["columns"]
    assert columns["published_per_second"] == [50.0, 50.0, 50.0]
    assert columns["held_age"] == [90.0, 90.0, 90.0]
    assert columns["time"] == sorted(columns["time"])
    timeline = browser.data("timeline")
    assert [(one["instance"], one["term"], one["end"], one["reason"]) for one in timeline["leaderships"]] == [
        ("h1", "7", "fenced", "no heartbeat"),
        ("h2", "8", None, ""),
    ]
    assert [mark["kind"] for mark in timeline["marks"]] == ["held"]
    events = browser.data("events", "kinds=leader_fenced,held")["events"]
    assert [event["kind"] for event in events] == ["held", "leader_fenced"]


def test_statistics_are_thinned(scene, browser):
    """A week of rows becomes at most 500 points, and a peak is still in one of them."""
    scene.execute(
        "INSERT INTO outbox_statistics (create_time, outbox, instance, interval_seconds, published, failed,"
        " published_bytes, deliverable) SELECT now() - n * interval '1 minute', 'public.outbox', 'h', 60, 60, 0, 1, n"
        " FROM generate_series(1, 9000) AS n"
    )
    columns = browser.data("statistics", "hours=168")["columns"]
    assert 400 < len(columns["time"]) <= 500
    assert max(columns["deliverable"]) == 9000
    assert set(columns["published_per_second"]) == {1.0}


def test_writers_that_hold_back_the_floor(scene, browser):
    """An open transaction that has stashed is named, with what ends it."""
    with scene.connect(application_name="web") as connection:
        scene.stasher.stash(connection, OutboxRecord("orders", "k", b"v"))
        document = browser.data("writers")
        pid = connection.info.backend_pid
    assert document["last_id"] == "1"
    (writer,) = document["writers"]
    assert (writer["pid"], writer["who"]) == (pid, f"pid {pid} (web)")
    assert writer["remedy"] == f"SELECT pg_terminate_backend({pid})"
    assert browser.data("writers")["writers"] == []


def test_findings_come_from_the_background(scene, browser):
    """The doctor's findings are never waited for; they come with remedies."""
    scene.hold("add", "orders")
    first = browser.data("findings")
    assert first["is_running"]
    wait_until(lambda: browser.data("findings")["at"], "the doctor has found nothing")
    found = {finding["subject"]: finding for finding in browser.data("findings")["findings"]}
    assert found["holds"]["verdict"] == "warning"
    assert found["holds"]["remedy"].startswith("`outbox hold list`")
    assert found["Kafka"]["unanswered"] == "kafka"


@pytest.mark.parametrize("route", ROUTES)
def test_a_database_that_is_away_is_told_as_data(scene, route):
    """Without its database a console answers all the same: with the reason, and without the password."""
    config = scene.config(data_source="host=127.0.0.1 port=1 user=u password=s3cret dbname=shop connect_timeout=2")
    browser = Browser(asking(Console({"shop": config}), User("alice", EVERYTHING)))
    path, _, query = route.partition("?")
    status, document = browser.get(path, query)
    assert status == 200
    half = document["database"] if route == "status" else document
    assert half["data"] is None
    assert half["unavailable"]["service"] == "database"
    assert "database shop at 127.0.0.1" in half["unavailable"]["reason"]
    assert "s3cret" not in str(document)
    assert browser.act("pause", {"topic": "orders", "reason": "r"})[1]["error"]["code"] == "unavailable"


def test_a_lock_is_named(scene, browser):
    """While the table is locked, who has locked it is said, and how to end that."""
    with scene.connect() as connection:
        connection.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
        status, document = browser.get("records")
        pid = connection.info.backend_pid
    assert status == 200
    assert f"pid {pid}" in document["unavailable"]["reason"]
    assert document["unavailable"]["remedy"] == f"SELECT pg_terminate_backend({pid})"


def test_what_is_optional_may_be_missing(database, scene, browser):
    """Without holds or history, what needs them says which command makes them; the rest is shown."""
    scene.fill("orders", 1)
    scene.execute("DROP TABLE outbox_hold, outbox_event, outbox_statistics")
    assert len(browser.data("records")["records"]) == 1
    assert [topic["topic"] for topic in browser.data("topics")["topics"]] == ["orders"]
    for route in ("holds", "events", "timeline", "statistics"):
        reason = browser.get(route)[1]["unavailable"]["reason"]
        assert "`outbox schema" in reason
    assert browser.get("status")[1]["database"]["data"]["holds"] is None
    status, document = browser.act("pause", {"topic": "orders", "reason": "r"})
    assert (status, document["error"]["code"]) == (409, "cannot")
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM outbox").fetchone() == (1,)
