"""Restarts of a failing pipeline, and their end; without Spark."""

import itertools
import threading

import pytest

from outbox_core.errors import InvalidConfig, StoreUnavailable
from outbox_spark.pipelines.follower import Follower, Lag, PipelineFailed


class _Log:
    def close(self):
        pass


class _Never(threading.Event):
    """An event that is never set, and that returns from a wait at once."""

    def wait(self, _=None):
        return False


class _Failing(Follower):
    """A follower whose queries fail of one error after the other, then succeed."""

    def __init__(self, errors):
        super().__init__(None, {}, None, [], None)
        self.__dict__["_log"] = _Log()
        self._errors = iter(errors)
        self.queries = 0

    def _run_query(self, **_):
        self.queries += 1
        error = next(self._errors, None)
        if error is not None:
            raise error


def _of_stage(number):
    return PipelineFailed(f"Task 0 in stage {number}.0 failed: SparkArithmeticException: [DIVIDE_BY_ZERO]")


def test_gives_up_what_does_not_pass():
    """The same failure six times in a row ends the pipeline, even if the numbers in its message differ."""
    follower = _Failing(map(_of_stage, itertools.count()))
    with pytest.raises(PipelineFailed, match="DIVIDE_BY_ZERO"):
        follower.run(once=False, stop=_Never())
    assert follower.queries == 6


def test_lag_in_offsets_and_seconds():
    """The lag lasts since the first look at an end that is not reached, and ends when all known ones are."""
    lag = Lag()
    assert lag.behind({"t": {"0": 5}}, {"t": {"0": 5}}, 0.0) == (0, 0.0)
    assert lag.behind({"t": {"0": 5}}, {"t": {"0": 9, "1": 2}}, 10.0) == (6, 0.0)
    assert lag.behind({"t": {"0": 7, "1": 2}}, {"t": {"0": 20, "1": 2}}, 14.0) == (13, 4.0)
    assert lag.behind({"t": {"0": 9, "1": 2}}, {"t": {"0": 20, "1": 2}}, 19.0) == (11, 5.0)
    assert lag.behind({"t": {"0": 20, "1": 2}}, {"t": {"0": 20, "1": 2}}, 21.0) == (0, 0.0)


def test_bears_outages():
    """The follower retries for as long as services are away, whether driver or worker reports it."""
    away = [StoreUnavailable("away"), PipelineFailed("outbox_core.errors.KafkaUnavailable: away")] * 600
    follower = _Failing(away)
    follower.run(once=False, stop=_Never())
    assert follower.queries == 1201


def test_bears_different_failures():
    """The follower goes on as long as its failures differ."""
    follower = _Failing([*map(_of_stage, range(5)), PipelineFailed("another"), *map(_of_stage, range(5))])
    follower.run(once=False, stop=_Never())
    assert follower.queries == 12


def test_once_is_tried_six_times():
    """With `once`, an outage ends the run after six attempts, so that cron reports it; `InvalidConfig` ends any run."""
    follower = _Failing(StoreUnavailable("away") for _ in range(20))
    with pytest.raises(StoreUnavailable):
        follower.run(once=True, stop=_Never())
    assert follower.queries == 6
    hopeless = _Failing([InvalidConfig("wrong")])
    with pytest.raises(InvalidConfig):
        hopeless.run(once=False, stop=_Never())
    assert hopeless.queries == 1
