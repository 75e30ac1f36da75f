"""Load from outside: requests that come by a clock or by clients, what became of them, and a picture of it."""
