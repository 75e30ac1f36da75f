"""What the conductor knows of its cluster, and where it places requests. Pure: no I/O, time is an argument."""
