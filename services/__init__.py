"""The four services. They never import each other."""
