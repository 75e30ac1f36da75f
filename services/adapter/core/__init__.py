"""What an adapter decides: which blocks its engine holds, under Moonpool's keys. Plain Python."""
