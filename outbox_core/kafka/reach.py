"""The brokers that answer us themselves, or do not.

A client with several brokers hides that one of them is out of its reach: another one answers its questions. So each
broker is asked by a client of its own, which knows no other.
"""

from __future__ import annotations

import math
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


def unreachable_leaders(
    settings: KafkaConfig, places: Collection[tuple[str, int]], timeout_seconds: float
) -> dict[tuple[str, int], str]:
    """Return the partitions that have a leader according to Kafka which does not answer us, with that broker.

    A partition that has no leader for anybody, or does not exist, is not among them.

    Args:
        settings: Of any client: its `bootstrap.servers`, and how it authenticates.
        places: Topics with numbers of partitions.
        timeout_seconds: For all questions together.

    Raises:
        KafkaUnavailable: if no broker answers at all.
    """
    end = time.monotonic() + timeout_seconds
    with _inquiry(settings, timeout_seconds * _LIST_SHARE) as inquiry:
        listed = inquiry.leaders({topic for topic, _ in places})
    leaders = {place: leader for place in places if (leader := listed.get(place)) is not None}
    silent = set(_silent(settings, set(leaders.values()), end))
    return {place: str(leader) for place, leader in leaders.items() if str(leader) in silent}


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
