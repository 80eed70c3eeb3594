"""Days, hours and texts of times: always those of UTC, in any time zone of the session."""

from datetime import UTC, date, datetime, timedelta

import pytest

from outbox_spark.runtime import utc

_TIMES = [
    datetime(2026, 11, 20, 23, 30, 0, 1, UTC),
    datetime(2026, 11, 21, 0, 15, tzinfo=UTC),
    # In Berlin both are half past two: the clock is set back.
    datetime(2026, 10, 25, 0, 30, tzinfo=UTC),
    datetime(2026, 10, 25, 1, 30, tzinfo=UTC),
    datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC),
]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Asia/Kolkata", "America/Los_Angeles"])
def test_times_are_those_of_utc(spark, zone):
    """A day, the beginning of an hour, a collected time and a text are the same in all sessions."""
    micros = [(time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) for time in _TIMES]
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        times = spark.createDataFrame([(number,) for number in micros], "micros BIGINT")
        times = times.selectExpr("timestamp_micros(micros) AS t").coalesce(1)
        rows = times.selectExpr(utc.day("t"), utc.hour("t"), utc.micros("t"), utc.text("t")).collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    for time, (day, hour, number, text) in zip(_TIMES, rows, strict=True):
        assert day == date(time.year, time.month, time.day)
        assert utc.from_micros(hour) == time.replace(minute=0, second=0, microsecond=0)
        assert utc.from_micros(number) == time
        assert datetime.fromisoformat(text) == time
