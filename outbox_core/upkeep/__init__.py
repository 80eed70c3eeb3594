"""Work beside harvesting, on threads of its own: counts of the backlog, the history, a watch over the process."""
