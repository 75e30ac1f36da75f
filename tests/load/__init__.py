"""Load tests: one frame, one program per service."""
