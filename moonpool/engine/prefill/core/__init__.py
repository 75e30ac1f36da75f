"""The prefill core: one instance's jobs, chunks, steps, loads, sends and blocks, decided without I/O."""
