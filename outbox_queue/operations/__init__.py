"""Commands and statistics for those who operate queues."""
