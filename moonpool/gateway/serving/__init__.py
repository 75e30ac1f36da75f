"""What endpoints share: authentication, bodies, generation, tool calls, errors, metrics."""
