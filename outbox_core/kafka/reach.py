"""The brokers that answer us themselves, or do not.

A client with several brokers hides that one of them is out of its reach: another one answers its questions. So each
broker is asked by a client of its own, which knows no other.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.admin import Broker, Inquiry
from outbox_core.kafka.clients import KafkaConfig

_AT_A_TIME: Final = 8  # each client has several threads and descriptors
_LIST_SHARE: Final = 0.5  # of the time, for the list of brokers at most


def unreachable_brokers(settings: KafkaConfig, timeout_seconds: float) -> list[str]:
    """Return the brokers of the cluster's metadata that do not answer us, such as "broker 3 at host:9092".

    Args:
        settings: Of any client: its `bootstrap.servers`, and how it authenticates.
        timeout_seconds: For all questions together.

    Raises:
        KafkaUnavailable: if no broker answers at all.
    """
    end = time.monotonic() + timeout_seconds
    with _inquiry(settings, timeout_seconds * _LIST_SHARE) as inquiry:
        listed = inquiry.cluster().brokers.values()
    return _silent(settings, map(Broker.of, listed), end)


class SilentBrokers:
    """The brokers that do not answer us, asked at most once in a while, whoever wants to know.

    Any thread may ask: of several that do so at once one asks the brokers, and the others wait for the same answer.

    Args:
        timeout_seconds: For all questions to the brokers together.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, list[str] | str]] = {}  # settings -> when asked; a text if none answers

    def lately(self, settings: KafkaConfig, max_age_seconds: float) -> list[str]:
        """Return the brokers that do not answer, as `unreachable_brokers` does, by an answer that is no older.

        Raises:
            KafkaUnavailable: if no broker answers at all.
        """
        key = repr(sorted(settings.items(), key=lambda one: one[0]))
        with self._lock:
            asked_at, found = self._known.get(key, (float("-inf"), []))
            if time.monotonic() - asked_at > max_age_seconds:
                found = self._ask(settings)
                self._known[key] = time.monotonic(), found
        if isinstance(found, str):
            raise KafkaUnavailable(found)
        return found

    def leading(
        self, settings: KafkaConfig, places: Collection[tuple[str, int | None]], max_age_seconds: float
    ) -> list[str]:
        """Return those of `lately` that lead one of some partitions, by topic and number, None for all of the topic.

        A partition that has no leader for anybody has none here, nor has a topic that does not exist, or that we may
        not see. If Kafka does not say who leads, any of the brokers may.

        Raises:
            KafkaUnavailable: if no broker answers at all.
        """
        silent = self.lately(settings, max_age_seconds)
        if not silent:
            return []
        try:
            with _inquiry(settings, self._timeout * _LIST_SHARE) as inquiry:
                listed = inquiry.leaders({topic for topic, _ in places})
        except KafkaUnavailable:
            return silent
        wanted = set(places)
        led = [str(leader) for (topic, part), leader in listed.items() if {(topic, part), (topic, None)} & wanted]
        return [broker for broker in silent if broker in led]

    def _ask(self, settings: KafkaConfig) -> list[str] | str:
        try:
            return unreachable_brokers(settings, self._timeout)
        except KafkaUnavailable as error:
            return str(error)


def _silent(settings: KafkaConfig, brokers: Iterable[Broker], end: float) -> list[str]:
    """Return those of some brokers that do not answer before `end` on the monotonic clock."""
    asked = sorted(brokers)
    if not asked:
        return []
    at_once = min(len(asked), _AT_A_TIME)
    seconds = max(0.0, end - time.monotonic()) / math.ceil(len(asked) / at_once)  # a silent one takes no other's time

    def answers(broker: Broker) -> bool:
        try:
            with _inquiry({**settings, "bootstrap.servers": broker.address}, seconds) as inquiry:
                inquiry.cluster()
        except KafkaUnavailable:
            return False
        return True

    with ThreadPoolExecutor(at_once, "outbox-reach") as pool:
        return [str(broker) for broker, is_there in zip(asked, pool.map(answers, asked), strict=True) if not is_there]


def _inquiry(settings: KafkaConfig, seconds: float) -> Inquiry:
    # A producer's settings may name its transactions, which an inquiry has none of.
    return Inquiry({name: value for name, value in settings.items() if name != "transactional.id"}, seconds)
