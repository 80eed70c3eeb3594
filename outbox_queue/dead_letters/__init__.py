"""Messages that were rejected or delivered too often."""
