"""Lets torchvision be imported whose compiled part is for GPUs: vLLM takes its transforms alone."""

import sys
from types import ModuleType

for name in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):  # of compiled operators
    sys.modules[name] = ModuleType(name)
