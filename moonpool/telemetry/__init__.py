"""Logs, recorded spans and gauges."""
