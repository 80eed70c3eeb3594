"""Restarts of a failing pipeline, and their end; without Spark."""

import itertools
import json
import threading
from types import SimpleNamespace

import pytest

from outbox_core.errors import InvalidConfig, StoreUnavailable
from outbox_spark.pipelines.follower import Follower, PipelineFailed, RecordsMissing, Target


class _Log:
    """A log of two partitions."""

    def close(self):
        pass

    def bounds(self):
        return {("t", 0): 2, ("t", 1): 3}, {("t", 0): 100, ("t", 1): 50}

    def ids(self):
        return {"t": "second"}


class _Never(threading.Event):
    """An event that is never set, and that returns from a wait at once."""

    def wait(self, _=None):
        return False


class _Failing(Follower):
    """A follower whose queries fail of one error after the other, then succeed."""

    def __init__(self, errors):
        super().__init__(None, {}, SimpleNamespace(name="p", metrics_port=None), [], None)
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


def test_bears_outages():
    """The follower retries for as long as services are away, whether driver or worker reports it."""
    away = [StoreUnavailable("away"), PipelineFailed("outbox_core.errors.KafkaUnavailable: away")] * 600
    follower = _Failing(away)
    follower.run(once=False, stop=_Never())
    assert follower.queries == 1201
    assert "KafkaUnavailable: away" in follower._metrics.trouble


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


class _Checkpoint:
    """A checkpoint with the ends of some batches."""

    url = "file:/c"

    def __init__(self, *ends):
        self._ends = {f"offsets/{number}": f"v1\n{{}}\n{json.dumps(end)}" for number, end in enumerate(ends)}

    def files(self, _):
        return [SimpleNamespace(path=path) for path in (*self._ends, "offsets/.7.crc")]

    def exists(self, path):
        return path in self._ends

    def read(self, path):
        return self._ends[path]


def _starting(*positions, offsets="latest", checkpoint=None):
    """Return where a query into tables with these positions begins without a checkpoint."""
    targets = [Target(SimpleNamespace(positions=position), None) for position in positions]
    settings = SimpleNamespace(name="p", topics=["t"], starting_offsets=offsets, accept_gap=False)
    follower = Follower(None, {}, settings, targets, None)
    follower.__dict__.update(_log=_Log(), _checkpoint=checkpoint or _Checkpoint())
    return follower._starting()


def test_a_new_target_skips_no_record_of_another():
    """With `latest`, a query into a new table and an older one begins where the older one is."""
    assert _starting({}) == {("t", 0): 100, ("t", 1): 50}
    assert _starting({}, offsets="earliest") == {("t", 0): 2, ("t", 1): 3}
    assert _starting({("t", 0): 20, ("t", 1): 10}, {}) == {("t", 0): 20, ("t", 1): 10}


def test_a_new_partition_begins_at_its_first_record():
    """With `latest` and without a checkpoint, a partition that a topic has got meanwhile is read as a whole."""
    assert _starting({("t", 0): 20, ("another", 0): 7}) == {("t", 0): 20, ("t", 1): 3}


@pytest.mark.parametrize("known", [{("t", 1): 51}, {("t", 2): 9}, {("t", 0): 1}])
def test_a_position_that_kafka_does_not_have_is_refused(known):
    """A position behind the end, before the beginning, or of a partition that is gone stops the pipeline."""
    with pytest.raises(RecordsMissing, match=r"t\[\d\]: the target has all below"):
        _starting(known)


def test_a_topic_made_anew_ends_a_pipeline_that_starts():
    """A topic that is long enough, but another one than in the last batch, is refused; an unknown one is not."""
    old, new, unknown = ({"t": {"0": 20, "1": 10} | more} for more in ({"id": "first"}, {"id": "second"}, {}))
    known = {("t", 0): 20, ("t", 1): 10}
    for ends in ((new,), (unknown,), (), (old, new)):
        assert _starting(known, checkpoint=_Checkpoint(*ends)) == known
    with pytest.raises(RecordsMissing, match="topic t was deleted and made anew since the last batch"):
        _starting(known, checkpoint=_Checkpoint(unknown, old))


def test_a_topic_made_anew_is_in_no_batch():
    """A batch that ends in another topic than it begins in writes nothing, though gaps are accepted."""
    ends = ({"t": {"0": 20, "id": "first"}}, {"t": {"0": 30, "id": "second"}})
    follower = Follower(None, {}, SimpleNamespace(name="p", accept_gap=True), [], None)
    follower.__dict__["_checkpoint"] = _Checkpoint(*ends)
    with pytest.raises(RecordsMissing, match="made anew"):
        follower._write(None, 1)


def test_a_batch_without_its_end_is_not_skipped():
    """A checkpoint that is deleted during a batch fails that batch, which would end nowhere, and write no record."""
    follower = Follower(None, {}, SimpleNamespace(name="p"), [], None)
    follower.__dict__["_checkpoint"] = _Checkpoint()
    with pytest.raises(PipelineFailed, match="file:/c has no offsets/7"):
        follower._write(None, 7)
