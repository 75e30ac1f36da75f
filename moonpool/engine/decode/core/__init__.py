"""The decode core: what a decode instance decides, without I/O. Requests, blocks, the batch and preemption."""
