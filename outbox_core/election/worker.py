"""Work that is done only while leading, on a thread of its own, so that it cannot hold up the elector."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_STANDBY_SECONDS = 0.02


class Worker:
    """Calls a task again and again while that is allowed. Starts at once, ends with the elector.

    Args:
        name: For the thread.
        task: A small unit of work.
        may_work: Whether this process leads; asked before each call.
        is_over: Set when there will be no more work.
        on_failure: Told what the task raised; it is not called again.
    """

    def __init__(
        self,
        name: str,
        task: Callable[[], object],
        *,
        may_work: Callable[[], bool],
        is_over: threading.Event,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._task = task
        self._may_work = may_work
        self._is_over = is_over
        self._on_failure = on_failure
        self._paused = False
        self._unit = threading.Lock()  # held during a call
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def thread(self) -> threading.Thread:
        """The thread that calls the task."""
        return self._thread

    def pause(self, timeout: float) -> None:
        """Allow no further call, and wait up to `timeout` seconds for the present one to return."""
        self._paused = True
        if threading.current_thread() is not self._thread and self._unit.acquire(timeout=timeout):
            self._unit.release()

    def resume(self) -> None:
        """End `pause`."""
        self._paused = False

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                worked = self._work_once()
            except BaseException as error:
                self._on_failure(error)
                return
            if not worked:
                self._is_over.wait(_STANDBY_SECONDS)

    def _work_once(self) -> bool:
        with self._unit:
            if self._paused or not self._may_work():
                return False
            self._task()
            return True
