"""Traces of requests: reading, generating and recording them."""
