"""HTTP endpoints: one module for each API, with bodies, response format and handlers."""
