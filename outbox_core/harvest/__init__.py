"""Harvesting: publish the records of the outbox. `Harvester` is the door; `EmbeddedHarvester` is for web servers."""

from outbox_core.harvest.embedded import EmbeddedHarvester
from outbox_core.harvest.harvester import Harvester

__all__ = ["EmbeddedHarvester", "Harvester"]
