"""Kernels in C++ without framework headers, for CPUs; built on this machine at first use."""
