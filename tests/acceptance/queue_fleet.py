"""Consumers and trackers of one queue, as processes that are killed and replaced, and their traces in the topics."""

import json
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from outbox_queue.protocol import headers
from outbox_queue.protocol import markers as wire
from outbox_queue.redelivery.redeliverer import REDELIVERED
from tests.kafka_reader import read_topic

READ_SECONDS = 2.0
"""Time in which a tracker that gets little CPU has read an end, and looked at it: what ends later may come again."""
_CHECKOUT = Path(__file__).resolve().parents[2]


class QueueFleet:
    """A constant number of consumers and trackers.

    Args:
        config: settings of the queue.
        queue: its name.
        directory: for journals and logs.
        consumers: number of consumers.
        trackers: number of trackers.
    """

    def __init__(self, config, queue, directory, *, consumers, trackers):
        self.kills = Counter()
        self._config, self._queue, self._directory = config, queue, directory
        self._made = 0
        self._running = {"consumer": [], "tracker": []}
        for role, count in (("consumer", consumers), ("tracker", trackers)):
            for _ in range(count):
                self.begin(role)

    def begin(self, role):
        """Start another process."""
        self._made += 1
        name = f"{role}-{self._made}"
        log = (self._directory / f"{name}.log").open("ab")
        command = [sys.executable, *(self._worker(name) if role == "consumer" else self._tracker())]
        process = subprocess.Popen(command, cwd=_CHECKOUT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._running[role].append(process)

    def kill_one(self, role):
        """Send SIGKILL to one at random, and start another in its place."""
        process = self._running[role].pop(random.randrange(len(self._running[role])))
        process.kill()
        process.wait()
        self.kills[role] += 1
        self.begin(role)

    def end(self):
        """Stop all of them; return the exit codes of those that had not been killed."""
        processes = [process for running in self._running.values() for process in running]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        codes = []
        for process in processes:
            try:
                codes.append(process.wait(60))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append("did not end")
        self._running = {"consumer": [], "tracker": []}
        return codes

    def journal(self):
        """Return the consumers' notes: (action, payload, attempt)."""
        lines = []
        for path in self._directory.glob("*.journal"):
            lines += (tuple(line.split()) for line in path.read_text().splitlines())
        return [(what, payload.encode(), int(attempt)) for what, payload, attempt in lines]

    def logs(self):
        """Return the text of their logs."""
        return "".join(path.read_text() for path in sorted(self._directory.glob("*.log")))

    def _worker(self, name):
        settings = {
            "config": self._config,
            "queue": self._queue,
            "journal": str(self._directory / f"{name}.journal"),
        }
        return ["-m", "tests.acceptance.queue_worker", json.dumps(settings)]

    def _tracker(self):
        path = self._directory / "queue.yaml"
        if not path.exists():
            path.write_text(json.dumps({name.replace("_", "-"): value for name, value in self._config.items()}))
        return ["-m", "outbox_core", "queue", "tracker", "-f", str(path)]


@dataclass
class Verdict:
    """The result of a run.

    Attributes:
        lost: messages that were neither acknowledged nor, if they are poison, set aside.
        redelivered_after_end: places in the message topic whose end marker was there for `READ_SECONDS` when a tracker
            sent their messages again.
        miscounted: messages whose copies are not attempts 1, 2, 3 and so on.
        poison: copies and dead letters of each poison message.
        dead: payloads in the dead letter topic.
        copies: messages that needed more than one copy.
    """

    lost: set = field(default_factory=set)
    redelivered_after_end: list = field(default_factory=list)
    miscounted: dict = field(default_factory=dict)
    poison: dict = field(default_factory=dict)
    dead: Counter = field(default_factory=Counter)
    copies: int = 0


def judge(config, sent, journal, *, is_poison):
    """Compare the sent messages with the journals and with the topics."""
    verdict = Verdict()
    acknowledged = {payload for what, payload, _ in journal if what == "ack"}
    dead_attempts = {}
    for letter in read_topic(config.bootstrap_servers, config.dead_letters, timeout=120):
        verdict.dead[letter.value] += 1
        dead_attempts[letter.value] = headers.read(letter.headers).attempt
    started_twice, ended_at = _read_markers(config)
    attempts = defaultdict(list)
    read_again = set()
    places, sent_at = {}, {}
    for message in read_topic(config.bootstrap_servers, config.message_topic, timeout=120):
        place, described = (message.partition, message.offset), headers.read(message.headers)
        attempts[message.value].append(described.attempt)
        if place in started_twice:
            read_again.add(message.value)
        origin = described.origin or place
        places[place] = origin, described.attempt
        sent_at[origin, described.attempt] = message.timestamp_ms
    for place, at in ended_at.items():
        origin, attempt = places[place]
        if sent_at.get((origin, attempt + 1), 0) > at + 1000 * READ_SECONDS:
            verdict.redelivered_after_end.append(place)
    for payload in sent:
        made = sorted(attempts[payload])
        verdict.copies += len(made) > 1
        # A place that was started twice was read twice: its consumer died before it could commit the offset.
        if payload not in read_again and made != list(range(1, len(made) + 1)):
            verdict.miscounted[payload] = made
        if is_poison(payload):
            verdict.poison[payload] = (len(made), dead_attempts.get(payload), payload in read_again)
        elif payload not in acknowledged and payload not in verdict.dead:
            verdict.lost.add(payload)
    return verdict


def _read_markers(config):
    """Return the places that were started more than once, and when a consumer ended those that a tracker ended, too.

    Both clocks are this machine's: the brokers stamp markers, and the trackers the copies they send.
    """
    starts = Counter()
    ended, ended_at = {}, {}
    for record in read_topic(config.bootstrap_servers, config.marker_topic, timeout=120):
        marker = wire.Marker.FromString(record.value)
        place = (marker.message_id.partition, marker.message_id.offset)
        if place[0] < 0:
            continue
        if marker.type == wire.START:
            starts[place] += 1
            ended.pop(place, None)  # it is worked on again
        elif marker.type == wire.END:
            if place in ended and marker.reason == REDELIVERED:
                ended_at[place] = ended[place]
            ended.setdefault(place, record.timestamp_ms)
    return {place for place, count in starts.items() if count > 1}, ended_at
