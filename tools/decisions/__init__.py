"""What the cores decide, recorded as text, so that two commits can be compared (`python -m tools.decisions`).

Cores are deterministic: the same events give the same actions. A change in the code's form (files, names) must leave
every decision unchanged; recording before and after, and comparing, proves this.
"""
