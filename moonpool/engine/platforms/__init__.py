"""Where a stage computes: the CPU, a CPU that behaves like a GPU, or a GPU. Import the modules."""
