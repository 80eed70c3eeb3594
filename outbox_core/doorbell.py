"""Deprecated name of `outbox_core.commit_signal`."""

import warnings

from outbox_core.commit_signal import has_subscribers as is_heard
from outbox_core.commit_signal import notify as ring
from outbox_core.commit_signal import subscribe as answer

__all__ = ["answer", "is_heard", "ring"]

warnings.warn("outbox_core.doorbell is now outbox_core.commit_signal: notify()", DeprecationWarning, stacklevel=2)
