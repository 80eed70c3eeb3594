"""The pipelines. Each has a function that turns a DataFrame into another one, and a `run` that the command calls."""
