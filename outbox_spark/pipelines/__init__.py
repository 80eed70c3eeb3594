"""Pipelines: each has a function from DataFrame to DataFrame, and a `run` for the command."""
