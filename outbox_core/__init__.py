"""kafka-outbox: a transactional outbox for Python.

Making records and stashing them needs no more than the application's own database connection. Harvesting needs the
extra `[harvester]`.
"""

from outbox_core.errors import (
    AcceptanceLost,
    InvalidMessageId,
    InvalidRecord,
    OutboxError,
    SerializationFailed,
    TransactionRequired,
)
from outbox_core.holds import Hold, Holds
from outbox_core.inbox import Inbox
from outbox_core.record import Header, OutboxRecord
from outbox_core.stasher import Stasher

__version__ = "0.1.0"
__all__ = [
    "AcceptanceLost",
    "Header",
    "Hold",
    "Holds",
    "Inbox",
    "InvalidMessageId",
    "InvalidRecord",
    "OutboxError",
    "OutboxRecord",
    "SerializationFailed",
    "Stasher",
    "TransactionRequired",
    "__version__",
]


def __dir__() -> list[str]:
    """Return the public names, without the modules that they come from."""
    return __all__
