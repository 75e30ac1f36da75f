"""Capacity planning: the least-cost mix of instances that serves a trace within its limits."""
