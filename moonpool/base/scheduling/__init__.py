"""Scheduling in plain Python, free of I/O: state machines, fair shares, KV blocks, steps, latency prediction."""
