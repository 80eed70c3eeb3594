"""Java, time zones, options and tasks, for every part on Spark."""
