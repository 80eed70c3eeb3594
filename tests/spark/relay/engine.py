"""Spark's handling of a stream, in a few lines: offsets are logged before a batch, commits after it, replays between.

An engine can be killed at any of its steps and started again, with its checkpoint or without.
"""

from dataclasses import dataclass, field

from outbox_spark.relay.stream import BEGINNING, OutboxStream

STEPS = ("planned", "logged", "purged", "sharded", "read", "one-published", "all-published", "committed")


class Killed(Exception):
    """An error that stands for the death of the engine."""


@dataclass
class Checkpoint:
    """The part that survives the engine."""

    offsets: list = field(default_factory=list)
    commits: int = 0

    def lose_last_commit(self):
        """Delete the last entry of the commit log."""
        self.commits = max(0, self.commits - 1)
        del self.offsets[self.commits + 1 :]


class Engine:
    """A runner of micro-batches.

    Args:
        stream: the source.
        read: a shard -> its rows.
        publish: a shard and its rows -> None; called for one shard after the other.
        checkpoint: the engine's notes of its batches.
        kill_at: (number of the batch in this engine's life, step) at which it dies; None for never.
        limit: number of rows that Spark asks for; None for all.
    """

    def __init__(self, stream: OutboxStream, read, publish, checkpoint, *, kill_at=None, limit=None):
        self.stream = stream
        self.checkpoint = checkpoint
        self._read = read
        self._publish = publish
        self._kill_at = kill_at
        self._limit = limit
        self._batches = 0

    def run(self):
        """Work until there are no more rows."""
        log = self.checkpoint
        while True:
            start = log.offsets[log.commits - 1] if log.commits else BEGINNING
            if len(log.offsets) > log.commits:
                end = log.offsets[log.commits]
            else:
                end = self.stream.latest(start, self._limit)
                if end == start:
                    return
                self._reach("planned")
                log.offsets.append(end)
                self._reach("logged")
                if log.commits:
                    self.stream.commit(start)
                self._reach("purged")
            self._execute(start, end)
            log.commits += 1
            self._reach("committed")
            self._batches += 1

    def _execute(self, start, end):
        shards = self.stream.shards(start, end)
        self._reach("sharded")
        for number, shard in enumerate(shards):
            rows = self._read(shard)
            self._reach("read")
            self._publish(shard, rows)
            if number == 0:
                self._reach("one-published")
        self._reach("all-published")

    def _reach(self, step):
        if self._kill_at == (self._batches, step):
            raise Killed(step)
