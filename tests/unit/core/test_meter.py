"""The meter: readings at intervals, with the right rates."""

from outbox_core.events import MeterStats
from outbox_core.monitoring.meter import Meter


class _Clock:
    time = 1000.0

    def __call__(self):
        return self.time


def test_readings():
    """A reading comes once the interval is over and records were counted, and has interval and total."""
    clock = _Clock()
    meter = Meter(5.0, clock)
    assert meter.add(10) is None
    clock.time += 4.9
    assert meter.add(20) is None
    clock.time += 0.1
    assert meter.add(20) == MeterStats(5.0, 5.0, 50, 50, 10.0, 10.0)
    clock.time += 10.0
    assert meter.add(100) == MeterStats(10.0, 15.0, 100, 150, 10.0, 10.0)
    assert meter.add(7) is None
    clock.time += 5.0
    assert meter.add(0) == MeterStats(5.0, 20.0, 7, 157, 1.4, 7.85)


def test_no_interval_at_all():
    """Neither an interval of zero nor a standing clock causes a division by zero."""
    clock = _Clock()
    meter = Meter(0.0, clock)
    assert meter.add(1) is None
    clock.time += 0.5
    reading = meter.add(1)
    assert (reading.interval_count, reading.interval_rate) == (2, 4.0)


def test_records_of_a_quiet_time_are_told():
    """Records after the last reading are told when the interval is over, without another record; silence is not."""
    clock = _Clock()
    meter = Meter(5.0, clock)
    assert meter.add(17) is None
    clock.time += 5
    assert meter.add(0).interval_count == 17
    assert meter.add(50) is None
    clock.time += 6
    reading = meter.add(0)
    assert (reading.interval_count, reading.total_count) == (50, 67)
    clock.time += 500
    assert meter.add(0) is None
    clock.time += 5
    assert meter.add(10).interval_seconds == 5.0
