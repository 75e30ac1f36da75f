"""Settings of all tests.

One thread for torch: tiny tensors gain nothing from more, and on busy cores threads wait for one another. Hypothesis
draws the same examples each time, however slow the machine is.
"""

import os

from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; engines are told a number of their own

settings.register_profile("moonpool", deadline=None, derandomize=True)
settings.load_profile("moonpool")
