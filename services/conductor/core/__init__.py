"""What the conductor decides, as state machines: events in, actions out, time as an argument."""
