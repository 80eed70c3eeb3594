"""Leader election through Kafka, usable on its own, by the protocol of `outbox_core.election.neli`."""

from outbox_core.election.config import NeliConfig
from outbox_core.election.lease import Leadership, now
from outbox_core.election.neli import Neli

__all__ = ["Leadership", "Neli", "NeliConfig", "now"]
