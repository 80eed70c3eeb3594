"""What the makers of Kafka clients raise, and what becomes of errors in the callbacks that users hand in."""

import logging
import threading
import time

import pytest

from outbox_core.errors import ClientRefused, InvalidConfig, KafkaUnavailable
from outbox_core.kafka.clients import end_client, make_admin, make_consumer, make_producer

AWAY = {"bootstrap.servers": "127.0.0.1:1", "reconnect.backoff.max.ms": 100}


def test_a_file_that_is_away_is_tried_again_and_ends_a_start():
    """A file of certificates that is not there is wrong settings where a process starts, and an outage later."""
    for make in (make_producer, make_admin, lambda config: make_consumer(config | {"group.id": "g"})):
        with pytest.raises(ClientRefused, match=r"ssl\.ca\.location") as raised:
            make(AWAY | {"security.protocol": "ssl", "ssl.ca.location": "/nowhere/ca.pem"})
        assert isinstance(raised.value, InvalidConfig)
        assert isinstance(raised.value, KafkaUnavailable)


@pytest.mark.parametrize("wrong", [{"botstrap.servers": "x"}, {"acks": "seven"}, {"logger": "no logger"}])
def test_a_wrong_setting_is_wrong_settings(wrong):
    """A setting that the client does not know or understand is an InvalidConfig, which names it."""
    with pytest.raises(InvalidConfig, match="Kafka settings"):
        make_producer(AWAY | wrong)


def test_no_token():
    """Without a token no client is made, and the error has what the callback raised; it may pass, and is no setting."""

    def fetch(_):
        raise RuntimeError("token endpoint is away: client_secret=hunter2")

    sasl = {"security.protocol": "sasl_plaintext", "sasl.mechanism": "OAUTHBEARER", "oauth_cb": fetch}
    for make in (make_producer, make_admin, lambda config: make_consumer(config | {"group.id": "g"})):
        with pytest.raises(KafkaUnavailable, match="oauth_cb raised RuntimeError: token endpoint is away") as raised:
            make(AWAY | sasl)
        assert not isinstance(raised.value, InvalidConfig)
        assert "hunter2" not in str(raised.value)


def test_callbacks_that_raise_are_logged_once_and_raise_nothing(caplog):
    """Errors of callbacks and of a logger do not leave poll() and flush(); each kind is logged once, with traceback."""

    class CallbackFailed(Exception):
        pass

    calls = {"stats_cb": 0, "error_cb": 0, "logger": 0}

    def failing(name):
        def call(*_):
            calls[name] += 1
            raise CallbackFailed(name)

        return call

    class Logger:
        log = staticmethod(failing("logger"))

    settings = {name: failing(name) for name in ("stats_cb", "error_cb")}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # another client logs nothing again
            producer = make_producer(AWAY | settings | {"statistics.interval.ms": 50, "logger": Logger()})
            before, end = dict(calls), time.monotonic() + 30
            while any(calls[name] < before[name] + 2 for name in calls) and time.monotonic() < end:
                producer.poll(0.05)
                producer.flush(0.05)
    assert min(calls.values()) >= 4
    told = [record for record in caplog.records if record.name == "outbox_core.kafka.clients"]
    assert sorted(record.message.split()[3] for record in told) == ["error_cb", "logger", "stats_cb"]
    assert all(record.exc_info for record in told)


def test_a_client_whose_end_takes_long_is_left_alone(monkeypatch):
    """The end of a client is waited for a moment, and not for as long as the lookup of a name hangs."""
    monkeypatch.setattr("outbox_core.kafka.clients._END_SECONDS", 0.05)
    hangs, ended = threading.Event(), threading.Event()
    end_client(lambda: (hangs.wait(10), ended.set()))
    assert not ended.is_set()
    hangs.set()
    assert ended.wait(10)
    ended.clear()
    end_client(ended.set)
    assert ended.is_set()
