"""Harvesting: publish the records of the outbox. `Harvester` is the door."""

from outbox_core.harvest.harvester import Harvester

__all__ = ["Harvester"]
