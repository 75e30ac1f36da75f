"""Pictures in prompts: what may be sent, their sizes, and the tokens that stand for them. Torch-free.

`files` looks at files in a process of their own (`file_process`); `rule` tells a checkpoint's rule.
"""
