"""CloudEvents in binary mode: what is written, what is read, and what is refused."""

from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox_core.errors import InvalidRecord
from outbox_core.formats.cloud_events import CloudEvent, InvalidCloudEvent, cloud_event_record

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
NEEDED = {"ce_specversion": b"1.0", "ce_id": b"1", "ce_source": b"/s", "ce_type": b"t"}


def test_what_is_written():
    """Attributes are headers in UTF-8 with the prefix `ce_`, the data is the value, its type `content-type`."""
    record = cloud_event_record(
        "orders",
        {"total": 42},
        type="com.example.paid",
        source="/shöp",
        id=UUID(int=7),
        time=NOON.astimezone(timezone(timedelta(hours=2))),
        subject="order-7",
        dataschema="https://example.com/paid.json",
        extensions={"minorversion": 0, "traced": True, "partitionkey": "k", "raw": b"\x00", "since": NOON},
        headers=[("mine", b"1")],
    )
    assert (record.topic, record.key, record.value) == ("orders", "k", '{"total":42}')
    assert dict(record.headers) == {
        "ce_specversion": "1.0",
        "ce_id": "00000000-0000-0000-0000-000000000007",
        "ce_source": "/shöp",
        "ce_type": "com.example.paid",
        "ce_time": "2026-01-02T12:00:00Z",
        "ce_subject": "order-7",
        "ce_dataschema": "https://example.com/paid.json",
        "ce_minorversion": "0",
        "ce_traced": "true",
        "ce_partitionkey": "k",
        "ce_raw": "AA==",
        "ce_since": "2026-01-02T12:00:00Z",
        "content-type": "application/json",
        "mine": b"1",
    }


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("2026-01-02t12:00:00z", NOON),
        ("2026-01-02T12:00:00.123456789Z", NOON.replace(microsecond=123456)),
        ("2026-01-02T12:00:00-00:00", NOON),
        ("2026-01-02T11:59:60Z", NOON - timedelta(microseconds=1)),
        ("2026-01-02T11:59:60.5Z", NOON - timedelta(microseconds=1)),
    ],
)
def test_times_of_rfc_3339(text, read):
    """Small letters, leap seconds and any number of digits are read, as the RFC has them."""
    headers = [("ce_id", b"1"), ("ce_source", b"s"), ("ce_type", b"t"), ("ce_specversion", b"1.0")]
    assert CloudEvent.of([*headers, ("ce_time", text.encode())], b"").time == read


def test_open_edx():
    """An event as Open edX's event bus writes it can be read, and one of ours has the headers that it reads."""
    headers = [
        ("ce_type", b"org.openedx.learning.auth.session.login.completed.v1"),
        ("ce_id", b"6a3e8b1c-0b5c-11ed-a5a0-0242ac120012"),
        ("ce_source", b"openedx/lms/web"),
        ("ce_specversion", b"1.0"),
        ("content-type", b"application/avro"),
        ("ce_time", b"2026-01-02T12:00:00.000001+00:00"),
        ("ce_sourcehost", b"edx.devstack.lms"),
        ("ce_minorversion", b"0"),
        ("ce_sourcelib", b"8.5.0"),
    ]
    event = CloudEvent.of(headers, b"\x00\x01")
    assert (event.source, event.datacontenttype, event.data) == ("openedx/lms/web", "application/avro", b"\x00\x01")
    assert event.extensions == {"sourcehost": "edx.devstack.lms", "minorversion": "0", "sourcelib": "8.5.0"}
    assert event.time == NOON.replace(microsecond=1)
    names = ("id", "source", "type", "time", "datacontenttype", "extensions")
    again = cloud_event_record("t", event.data, **{name: getattr(event, name) for name in names})
    assert {name: value.encode() for name, value in again.headers}.keys() == dict(headers).keys()


_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


@settings(max_examples=30)
@given(
    attributes=st.fixed_dictionaries(
        {"type": _text, "source": _text, "id": _text},
        optional={
            "subject": _text,
            "dataschema": _text,
            "datacontenttype": st.just("text/plain"),
            "time": st.datetimes(timezones=st.just(UTC)),
            "extensions": st.dictionaries(st.from_regex(r"x[a-z0-9]{0,19}", fullmatch=True), _text, max_size=3),
        },
    ),
    data=st.none() | st.binary(),
)
def test_events_read_back(attributes, data):
    """Whatever is written is read back."""
    record = cloud_event_record("t", data, **attributes)
    stored = [(name, value.encode()) for name, value in record.headers]
    event = CloudEvent.of(stored, record.value)
    assert event.data == data
    assert {name: getattr(event, name) for name in attributes} == attributes


def test_defaults():
    """An event gets an id and the time of its making; only JSON that we wrote ourselves is called so."""
    one, two = (cloud_event_record("t", b"raw", type="a", source="b") for _ in range(2))
    first, second = (CloudEvent.of(record.headers, record.value) for record in (one, two))
    assert first.id != second.id
    assert abs(first.time - datetime.now(UTC)) < timedelta(hours=1)
    assert first.datacontenttype is None
    packed = cloud_event_record("t", {"a": 1}, type="a", source="b", serializer=lambda value: repr(value).encode())
    assert "content-type" not in dict(packed.headers)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"type": ""}, "^type: expected text"),
        ({"source": 7.5}, "^source: expected text"),
        ({"time": datetime(2026, 1, 2)}, "^time: expected a time with a time zone"),  # noqa: DTZ001
        ({"extensions": {"Upper": "x"}}, "^extensions: 'Upper'"),
        ({"extensions": {"id": "x"}}, "^extensions: 'id'"),
        ({"extensions": {"x" * 21: "x"}}, "^extensions: "),
    ],
)
def test_what_is_not_written(wrong, expected):
    """A wrong attribute raises, by its name."""
    with pytest.raises(InvalidRecord, match=expected):
        cloud_event_record("t", None, **{"type": "a", "source": "b", **wrong})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        *(({name: None}, f"^{name}: the record has no such header") for name in NEEDED),
        ({"ce_specversion": b"0.3"}, "^ce_specversion: only 1.0"),
        ({"ce_id": b"\xff"}, "^ce_id: is not UTF-8"),
        ({"ce_time": b"noon"}, "^ce_time: 'noon' is no time"),
        ({"Content-Type": b"application/cloudevents+json; charset=utf-8"}, "structured mode"),
    ],
)
def test_what_is_not_read(change, expected):
    """A record that is no event in binary mode raises, by its header."""
    with pytest.raises(InvalidCloudEvent, match=expected):
        CloudEvent.of(list({**NEEDED, **change}.items()), b"{}")


def test_no_headers_at_all():
    """A record without headers is no event."""
    with pytest.raises(InvalidCloudEvent, match="ce_id"):
        CloudEvent.of(None, b"{}")


def test_json_data():
    """Data is read as JSON if it may be that."""
    event = CloudEvent.of([*NEEDED.items(), ("content-type", b"application/vnd.x+json;charset=utf-8")], b'{"a":1}')
    assert event.json() == {"a": 1}
    no_json = (b"{", b"[" * 100_000, None)
    for content_type, data in ((b"text/plain", b"{}"), *((b"application/json", data) for data in no_json)):
        with pytest.raises(InvalidCloudEvent, match=r"^data: "):
            CloudEvent.of([*NEEDED.items(), ("content-type", content_type)], data).json()
