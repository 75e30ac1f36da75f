"""Compiles native code with the system's compiler, once for each user."""
