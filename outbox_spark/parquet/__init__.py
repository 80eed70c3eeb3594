"""Parquet tables that record their own position in the topics."""
