"""The conductor's knowledge about the cluster, and where requests are placed. Pure: no I/O, time is an argument."""
