"""The `moonpool` command. It may import everything; nothing imports it."""
