"""The streams of the contract: Put, Get and Watch."""
