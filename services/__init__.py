"""The services. They never import each other."""
