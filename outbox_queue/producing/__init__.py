"""Sending and stashing messages."""
