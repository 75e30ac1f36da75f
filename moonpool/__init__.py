"""Moonpool: code that all services share, and the client SDK."""
