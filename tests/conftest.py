"""One thread for torch: tiny tensors gain nothing from more, and on busy cores threads wait for one another."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; engines are told a number of their own
