"""Receiving messages, and acknowledging each by itself."""
