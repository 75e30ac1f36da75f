"""Capacity planning: the cheapest mix of instances that serves a trace within the limits."""
