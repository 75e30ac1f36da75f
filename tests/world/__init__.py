"""The real services in one process on a virtual clock: deterministic, without waiting, with faults by a seed."""
