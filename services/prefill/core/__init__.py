"""The prefill core: jobs, chunks, steps, loads, sends and blocks of one instance, decided without I/O."""
