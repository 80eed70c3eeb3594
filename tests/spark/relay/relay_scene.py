"""An outbox and its relays on real services, without Spark."""

import json
from uuid import uuid4

from confluent_kafka import Producer

from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.record_producer import RecordProducer
from outbox_core.kafka.topics import ensure_leader_topic
from outbox_spark.relay import fencing
from outbox_spark.relay.plan import BatchPlan, Planner
from outbox_spark.relay.shard_store import ShardStore
from outbox_spark.relay.shard_task import ShardTask
from tests.harvesting import Scene

SHARDS = 2


class Killed(BaseException):
    """An error that stands for the death of a task and its driver."""


def slow_ends(monkeypatch):
    """Let each commit and abort count as one that may have been sent twice."""
    end = RecordProducer._end

    def slow(producer, *arguments):
        try:
            end(producer, *arguments)
        finally:
            producer._must_replace = True

    monkeypatch.setattr(RecordProducer, "_end", slow)


class RelayScene(Scene):
    """An outbox and the relays that publish it, one term after the other."""

    def __init__(self, database, bootstrap, **options):
        super().__init__(database, bootstrap, **options)
        self.settings = self.config(delivery="exactly-once")
        self.store = ShardStore.of(self.settings)
        self.identity = self.store.check()
        self.transactions = TransactionalIdentity.of(self.settings, self.identity)
        self.leader_topic = self.settings.leader_names(self.identity).topic
        ensure_leader_topic(self.transactions.kafka, self.leader_topic)
        fencing.ensure_shards(self.transactions, SHARDS)
        self.sent = 0

    def close(self):
        self.store.close()
        super().close()

    def claim(self):
        """Claim leadership; return the number of the claim."""
        producer, offsets = Producer({"bootstrap.servers": self.bootstrap}), []
        message = json.dumps({"type": "claim", "id": str(uuid4()), "name": "test"})
        producer.produce(self.leader_topic, message, on_delivery=lambda _, done: offsets.append(done.offset()))
        producer.flush()
        return offsets[0]

    def settle(self):
        fencing.fence_and_purge(self.transactions, self.store, lambda: False)
        fencing.refuse_marked_rows(self.transactions, self.store)

    def plan(self, term, planner, *, shards=SHARDS, rows=20, **options):
        """Return the plan of the next batch, None if there is none."""
        fencing.ensure_shards(self.transactions, shards)
        ranges, server = planner.next(), options.pop("server_id", self.store.server_id())
        options |= {"harvest": self.settings, "outbox": self.identity, "term": term, "server_id": server}
        return BatchPlan(ranges=ranges, holds=planner.holds, rows=rows, **options) if ranges else None

    def first_plan(self, **options):
        """Return the first plan of a new term."""
        term = self.claim()
        self.settle()
        return self.plan(term, Planner(self.store, options.get("shards", SHARDS)), **options)

    def run(self, plan, failpoint=lambda _: None):
        """Run the tasks of a batch, one after the other."""
        outcomes = [ShardTask(plan, wanted.number, failpoint=failpoint).run() for wanted in plan.ranges]
        self.sent += sum(outcome.published for outcome in outcomes)
        return outcomes

    def relay(self, *, kill_at=None, shards=SHARDS, reached=lambda _: None, **options):
        """Relay all rows in a new term, or die at the n-th time that a step is reached; return the errors."""
        seen = []

        def failpoint(step):
            seen.append(step)
            reached(step)
            if kill_at is not None and step == kill_at[1] and seen.count(step) == kill_at[0]:
                raise Killed(step)

        term, errors = self.claim(), []
        self.settle()
        planner = Planner(self.store, shards)
        while not errors and (plan := self.plan(term, planner, shards=shards, **options)):
            for outcome in self.run(plan, failpoint):
                planner.finished(outcome)
                errors += [f"{outcome.error}: {outcome.message}"] * bool(outcome.error)
        if not errors:
            self.settle()
        return errors
