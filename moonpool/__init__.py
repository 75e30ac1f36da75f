"""Moonpool: what its services share, and the client SDK."""
