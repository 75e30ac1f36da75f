"""The emulated engine: steps take a profile's time and compute nothing."""
