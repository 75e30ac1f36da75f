"""The `moonpool` command; a leaf that may import everything and that nothing imports."""
