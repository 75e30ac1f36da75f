"""What a simulation runs on: a heap of events, links that flows share, disks, calls with delays."""
