"""What a run found: sums in bounded memory, tables, pictures."""
