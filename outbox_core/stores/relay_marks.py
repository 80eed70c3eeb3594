"""The leader IDs that relays on Spark marked rows with before they worked without marks: a range of UUIDs of version 8.

Unlike marks of at-least-once delivery, these do not say that a row may be published already: the manifests of the
relay's shards tell what it published. Rows may carry them as long as a table lives.
"""

from __future__ import annotations

from uuid import UUID

FIRST = UUID("b869fb40-0000-8000-8000-000000000000")
"""The lowest mark of any relay."""

LAST = UUID("b869fb7f-ffff-8fff-bfff-ffffffffffff")
"""The highest mark of any relay."""
