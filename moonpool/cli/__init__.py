"""The `moonpool` command. May import every package; no package imports this one."""
