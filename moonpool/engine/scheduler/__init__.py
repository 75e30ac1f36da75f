"""What both schedulers of an engine share: prefill's and decode's cores (ADR 81). No I/O, no clock, no randomness."""
