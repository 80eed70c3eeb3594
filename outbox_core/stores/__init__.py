"""Outbox stores: one module for each database."""
