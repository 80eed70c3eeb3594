"""The how-to on encrypted fields: no plaintext gets anywhere, and an erased subject cannot be read."""

import json
import logging
import re
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidTag

from tests.harvesting import wait_until
from tests.kafka_reader import read_topic

PAGE = Path(__file__).parents[3] / "docs" / "encrypted-fields.md"
PLAIN = ("ada@example.com", "St James", "ada@", "example.com")


@pytest.fixture
def page():
    """Return what the page's code defines."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), names)  # noqa: S102  our own page
    return names


@pytest.fixture(autouse=True)
def _subject_keys(scene):
    """Make the page's table."""
    scene.execute(re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)[0])


@pytest.mark.real_broker
def test_no_plaintext_anywhere(scene, make_topic, page, caplog, capfd):
    """Table, log, topic and dead letters have no plaintext, also where Kafka refuses the record; consumers read it."""
    caplog.set_level(logging.DEBUG)
    good, small = make_topic(1), make_topic(1, config={"max.message.bytes": "200"})
    letters = f"{good}-letters"
    order = {"total": 42, "email": "ada@example.com", "address": "12 St James's Square"}
    with scene.connect() as connection:
        sealed = page["encrypted"](connection, "7", order, "email", "address")
        for topic in (good, small):
            scene.stasher.stash(connection, page["OutboxRecord"](topic, key="7", value=sealed))
    table = repr(scene.execute(f"SELECT o::text, encode(kafka_value, 'escape') FROM {scene.table.quoted} AS o"))
    config = {"on_poison": "dead-letter", "dead_letter_topic": letters}
    with scene.running(config=config):
        wait_until(lambda: scene.count() == 0, "one record is published, the other a dead letter")
    arrived, dead = scene.read(good), read_topic(scene.bootstrap, letters)
    assert (len(arrived), len(dead)) == (1, 1)
    output = capfd.readouterr()
    everywhere = "\n".join([table, caplog.text, output.out, output.err, repr(arrived), repr(dead), repr(sealed)])
    assert "total" in everywhere
    assert small in caplog.text, "the log tells of the refused record"
    for plain in PLAIN:
        assert plain not in everywhere
    with scene.connect() as connection:
        read = page["decrypted"](connection, json.loads(dead[0].value))
        assert {field: read[field] for field in order} == order
        page["erase"](connection, "7")
    with scene.connect() as connection:
        read = page["decrypted"](connection, json.loads(arrived[0].value))
    assert read == {"total": 42, "email": None, "address": None, "subject": "7"}


def test_a_field_cannot_be_moved(scene, page):
    """A sealed field of one subject or name cannot be passed off as another's; a second subject has another key."""
    with scene.connect() as connection:
        one = page["encrypted"](connection, "1", {"email": "ada@example.com", "name": "Ada"}, "email", "name")
        page["encrypted"](connection, "2", {}, *())
        for forged in ({**one, "subject": "2"}, {**one, "email": one["name"]}):
            with pytest.raises(InvalidTag):
                page["decrypted"](connection, forged)
        page["place_order"](connection, "1")
    assert [row.kafka_key for row in scene.rows()] == ["1"]
    assert b"ada@" not in scene.rows()[0].kafka_value
