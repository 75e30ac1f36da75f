"""Scheduling cores that more than one service runs. Pure: no I/O, no clock, no randomness."""
