"""The emulated engine: steps take the time of a profile and compute nothing."""
