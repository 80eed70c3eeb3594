"""The numbers of a harvester: the families of its metrics, counts of published batches, and its history in tables."""
