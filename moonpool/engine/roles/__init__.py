"""What an engine process is built from: one role, or either."""
