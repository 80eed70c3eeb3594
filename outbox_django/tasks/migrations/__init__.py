"""The table of task results."""
