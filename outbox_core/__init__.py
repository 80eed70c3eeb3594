"""kafka-outbox: a transactional outbox for Python.

The base package has no dependencies: making records and stashing them needs only the database connection that the
application already has. Harvesting needs the extra `[harvester]`.
"""

from outbox_core.errors import InvalidMessageId, InvalidRecord, OutboxError, TransactionRequired
from outbox_core.holds import Hold, Holds
from outbox_core.inbox import Inbox
from outbox_core.record import Header, OutboxRecord
from outbox_core.stasher import Stasher

__version__ = "0.1.0"
__all__ = [
    "Header",
    "Hold",
    "Holds",
    "Inbox",
    "InvalidMessageId",
    "InvalidRecord",
    "OutboxError",
    "OutboxRecord",
    "Stasher",
    "TransactionRequired",
    "__version__",
]
