"""An adapter's decision: which blocks the engine holds, under Moonpool's keys. Plain Python."""
