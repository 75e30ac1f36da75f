"""What the cores decide, recorded as text, so that two commits can be compared (`python -m tools.decisions`).

Cores are deterministic: the same events give the same actions. A change of the code's form (files, names) must leave
every decision as it was; recording before and after, and comparing, shows that it did.
"""
