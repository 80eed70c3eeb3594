"""Measurements of the harvester beside the raw limits of the same machine in the same run. See RESULTS.md."""
