"""Leader election through Kafka, usable on its own; the protocol is told in `outbox_core.election.neli`."""

from outbox_core.election.config import NeliConfig
from outbox_core.election.leadership import Leadership, now
from outbox_core.election.neli import Neli

__all__ = ["Leadership", "Neli", "NeliConfig", "now"]
