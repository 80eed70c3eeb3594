"""Claim checks: large payloads go to a store of their own, and their records carry a header that names them.

The invariant: whoever can read a record's header can read its payload. So the order is fixed:

1. `stash` writes the payload to the store, and waits until it is durable;
2. only then it writes the record, whose value is empty, in the caller's transaction.

A crash or a rollback between the two leaves a payload that no record names, an orphan. `outbox claims delete` finds it:
neither the table nor the topics name it. A committed record without a payload cannot be. A table of the outbox's own
database takes both in one transaction (`TableStore(..., with_record=True)`), and leaves no orphan either.
"""

from outbox_core.claims.claims import CLAIM_HEADER, ClaimCheck, ClaimMissing, ClaimStore, ClaimStoreFailed, claim_of
from outbox_core.claims.stores import FolderStore, FsspecStore, TableStore

__all__ = [
    "CLAIM_HEADER",
    "ClaimCheck",
    "ClaimMissing",
    "ClaimStore",
    "ClaimStoreFailed",
    "FolderStore",
    "FsspecStore",
    "TableStore",
    "claim_of",
]
