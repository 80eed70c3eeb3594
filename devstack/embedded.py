"""The embedded broker: librdkafka's mock cluster, held open by a small process of its own.

For machines where neither Java nor Kafka's jars can be had, and for quick tests. It does idempotent produce, headers
and consumer groups with real rebalances. It does *not* fence producers, hide aborted transactions, store transactional
offsets, answer admin requests (a topic appears, with 4 partitions, when `list_topics(name)` asks for it), keep anything
across a restart, or advertise a proxy's port. So exactly once is neither shown nor tested on it.

`python -m devstack.embedded DIRECTORY` is the process: it writes its bootstrap address to a file there and lives until
it gets SIGTERM.
"""

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from confluent_kafka import Producer

from devstack.errors import DevstackError, log_tail
from devstack.processes import ServiceProcess, wait_until

_SECONDS_TO_START = 20
_CHECKOUT = Path(__file__).resolve().parents[1]


class EmbeddedBroker:
    """The mock cluster, with the interface of `KafkaBroker` as far as it can be.

    Args:
        directory: Holds its log, pid and address; may belong to one that already runs, which `start` then reuses.
    """

    is_embedded = True
    description = "embedded broker (librdkafka's mock cluster)"

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory).absolute()
        self._log = self._directory / "embedded.log"
        self._address = self._directory / "bootstrap"
        self._process = ServiceProcess(self._directory / "broker.pid", f"devstack.embedded {self._directory}")

    @property
    def bootstrap(self) -> str:
        """Return host and port to connect to, another one after each start."""
        try:
            return self._address.read_text().strip()
        except OSError as error:
            raise DevstackError(f"the embedded broker in {self._directory} is not started") from error

    @property
    def pid(self) -> int | None:
        """Return the pid of the process that holds the cluster, or None if it does not run."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Tell whether that process is alive."""
        return self._process.pid is not None

    def start(self) -> None:
        """Start it and wait for its address.

        Raises:
            DevstackError: It did not start; the message ends with the tail of its log.
        """
        if self.is_running:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        self._address.unlink(missing_ok=True)
        self._process.spawn(
            [sys.executable, "-m", "devstack.embedded", self._directory],
            log=self._log,
            env={**os.environ, "PYTHONPATH": str(_CHECKOUT)},
        )
        wait_until(lambda: self._address.exists() or not self.is_running, timeout=_SECONDS_TO_START)
        if not self._address.exists():
            self.stop()
            raise DevstackError(f"the embedded broker did not start; end of {self._log}:{log_tail(self._log)}")

    def stop(self) -> None:
        """End it with all its records; does nothing if it does not run."""
        self._process.terminate()
        self._address.unlink(missing_ok=True)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()

    def restart(self) -> NoReturn:
        """Refuse: the mock cluster keeps neither its port nor its records."""
        raise DevstackError("the embedded broker cannot restart on its port and data; this needs the real broker")

    def proxied(self, number: int) -> NoReturn:
        """Refuse: the mock cluster advertises its own port."""
        raise DevstackError(f"the embedded broker has no proxied listener {number}; this needs the real broker")


def hold_cluster(directory: Path) -> None:
    """Hold a mock cluster open until SIGTERM or SIGINT."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before librdkafka makes threads, which inherit it
    holder = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1})
    brokers = holder.list_topics(timeout=10).brokers
    partial = directory / "bootstrap.partial"
    partial.write_text(",".join(f"{broker.host}:{broker.port}" for broker in brokers.values()))
    partial.rename(directory / "bootstrap")
    signal.sigwait(ends)


if __name__ == "__main__":
    hold_cluster(Path(sys.argv[1]))
