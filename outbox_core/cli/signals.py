"""SIGTERM, SIGINT and SIGHUP: the first asks for a graceful stop, a second SIGTERM or SIGINT ends the process at once.

A signal that follows within a tenth of a second is the same one, sent twice: `timeout` signals its command and the
group that both are in, and so do a terminal and a program that passes Ctrl-C on. SIGHUP comes from a terminal that is
closed; `nohup` has it ignored, and it stays so.

Python runs signal handlers between two instructions of the main thread, which may sit in a C function for seconds
(connecting to Kafka, for example) or hold a lock that `stop` needs. So the handlers do nothing; the interpreter writes
each signal's number into a socket as it arrives, and a thread that reads the socket acts on it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SENT_TWICE_SECONDS = 0.1

_log = logging.getLogger(__name__)


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first signal within the context, and exit with 128 + its number at the second.

    `stop` is called on another thread, and must return soon. Old handlers are restored at the end. Outside the main
    thread, where Python allows no handlers, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    old_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    wanted = [number for number in _SIGNALS if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)]
    old_handlers = {number: signal.signal(number, _do_nothing) for number in wanted}
    watcher = threading.Thread(target=_watch, args=(reader, stop), name="outbox-signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(old_descriptor)
        writer.close()
        watcher.join()
        reader.close()


def _do_nothing(*_: object) -> None:
    """Do nothing: `_watch` acts."""


def _watch(reader: socket.socket, stop: Callable[[], None]) -> None:
    stopping_since = None
    while received := reader.recv(1):
        number = received[0]
        if number not in _SIGNALS:
            continue
        now = time.monotonic()
        if stopping_since is not None:
            if number != signal.SIGHUP and now - stopping_since > _SENT_TWICE_SECONDS:
                os._exit(128 + number)
            continue
        stopping_since = now
        _log.info("%s: finishing what is in flight; another signal exits at once", signal.Signals(number).name)
        stop()
