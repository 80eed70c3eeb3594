"""The limit of the records in flight, beside a Kafka that the test makes quick or slow."""

import logging

import pytest

from outbox_core.harvest.at_least_once.flight_limit import FlightLimit
from outbox_core.stores.interface import NO_LIMIT

TIMEOUT = 3.0
MEAN = 1024
FULL = 20_000


class Link:
    """A link that takes so many records a second, with a sender that has always more of them."""

    def __init__(self, rate):
        self.limit = FlightLimit()
        self.rate = rate
        self.time = 0.0
        self.flight = []  # when they were sent
        self.timed_out = 0

    def run(self, seconds, step=0.01):
        """Send, and acknowledge, for so long."""
        end = self.time + seconds
        while self.time < end:
            room = min(self.limit.room(len(self.flight), MEAN), FULL - len(self.flight))
            self.flight += [self.time] * room
            self.limit.is_reached = self.limit.is_reached or len(self.flight) < FULL
            self.time += step
            number = min(len(self.flight), round(self.rate * step))
            arrived, flight = self.flight[:number], self.flight[number:]
            self.flight = [sent_at for sent_at in flight if self.time - sent_at < TIMEOUT]
            if arrived:
                self.limit.acknowledged([(sent_at, 1) for sent_at in arrived], self.time, len(self.flight), TIMEOUT)
            if len(self.flight) < len(flight):
                self.timed_out += len(flight) - len(self.flight)
                self.limit.timed_out(len(flight), self.time, TIMEOUT)

    @property
    def room(self):
        return self.limit.room(0, MEAN)


def test_a_quick_kafka_has_no_limit():
    """As long as acknowledgements are quick, all that there is may be in flight."""
    link = Link(rate=100_000)
    link.run(10)
    assert link.room == NO_LIMIT // (2 * 1024)
    assert link.timed_out == 0


@pytest.mark.parametrize("rate", [300, 1_000, 10_000])
def test_it_settles_where_records_arrive_in_time(rate):
    """After the first moments about as many are in flight as arrive within a third of the delivery timeout."""
    link = Link(rate)
    link.run(10)
    first = link.timed_out
    link.run(60)
    assert link.timed_out == first < FULL
    assert rate * TIMEOUT / 12 < link.room < rate * TIMEOUT / 1.5


def test_a_slower_kafka(caplog):
    """It falls when Kafka gets slower, which is logged, and grows again slowly when that is over."""
    caplog.set_level(logging.INFO)
    link = Link(10_000)
    link.run(20)
    quick = link.room
    link.rate = 500
    link.run(20)
    assert link.room < 1_000
    late = link.timed_out
    link.rate = 10_000
    link.run(3)
    assert link.room < 4_000, "it doubles in four seconds"
    link.run(30)
    assert link.room > quick / 2
    assert link.timed_out == late
    assert caplog.text.count("Kafka acknowledges after") == 1


def test_a_partition_that_is_away():
    """Records for it that time out while others arrive do not lower it, nor do some that are late when it is back."""
    link = Link(100_000)
    link.run(5)
    link.limit.timed_out(5_000, link.time, TIMEOUT)
    link.limit.acknowledged([(link.time - 2.0, 50)], link.time, 50, TIMEOUT)
    assert link.room == NO_LIMIT // (2 * 1024)


def test_an_outage_lowers_it_once():
    """Records that time out lower it if none has arrived for as long, once; few of them do not."""
    link = Link(100_000)
    link.run(5)
    link.limit.timed_out(50, link.time + 4, TIMEOUT)
    assert link.room > FULL
    for second in range(4, 60):
        link.limit.timed_out(20_000, link.time + second, TIMEOUT)
    assert link.room == 5_000


def test_it_does_not_grow_unless_it_is_reached():
    """Records that were never in flight together prove nothing, however quickly they arrive."""
    limit = FlightLimit()
    limit.room(0, MEAN)
    limit.timed_out(4_000, 0.0, TIMEOUT)
    for second in range(1000):
        limit.acknowledged([(float(second), 1)], second + 0.01, 0, TIMEOUT)
    assert limit.room(0, MEAN) == 1_000


def test_large_records():
    """It is of bytes, and one record is always let through."""
    limit = FlightLimit()
    limit.room(0, MEAN)
    limit.timed_out(1, 0.0, TIMEOUT)
    limit.timed_out(200, 0.0, TIMEOUT)
    assert limit.room(0, 31 * 1024) == 8
    assert limit.room(3, 31 * 1024) == 5
    assert limit.room(0, 10**7) == 1
    assert limit.room(1, 10**7) == 0
