"""The SSD tier: segment files and their index in LMDB."""
