"""A task that runs only while leading, on a thread of its own, so that it cannot hold up the elector."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_STANDBY_SECONDS = 0.02


class BackgroundTask:
    """A thread that repeats a small unit of work while `may_work`, asked before each call, says so.

    It starts at once and ends when `is_over` is set, or with the task's first error, which goes to `on_failure`.
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
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def pause(self, timeout: float) -> None:
        """Allow no further call, and wait up to `timeout` seconds for the present one to return."""
        self._paused = True
        if threading.current_thread() is not self.thread and self._unit.acquire(timeout=timeout):
            self._unit.release()

    def resume(self) -> None:
        """End `pause`."""
        self._paused = False

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                with self._unit:
                    works = not self._paused and self._may_work()
                    if works:
                        self._task()
            except BaseException as error:
                self._on_failure(error)
                return
            if not works:
                self._is_over.wait(_STANDBY_SECONDS)
