"""The conductor: registry, prefix index, placement, admission, and every request's way."""
