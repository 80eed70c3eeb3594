"""Pipelines: each has a function from DataFrame to DataFrame, and `run` or `targets` for the command."""
