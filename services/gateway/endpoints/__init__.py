"""HTTP endpoints: one module for each API, with its bodies, its response format and its handlers."""
