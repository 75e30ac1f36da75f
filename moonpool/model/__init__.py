"""The transformer: weights of a stage, one forward over a packed batch, the sampler, random checkpoints.

Needs torch.
"""

from moonpool.model.batch import PackedBatch
from moonpool.model.load import load_stage, torch_dtype
from moonpool.model.sampler import sample
from moonpool.model.stage import StageModel

__all__ = ["PackedBatch", "StageModel", "load_stage", "sample", "torch_dtype"]
