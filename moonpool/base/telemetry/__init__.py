"""Logs, recorded spans and metrics."""
