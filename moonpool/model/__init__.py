"""The transformer: weights of a stage, one forward over a packed batch, the sampler, random checkpoints.

Needs torch.
"""

from moonpool.models.batch import PackedBatch
from moonpool.models.loader import load_stage, torch_dtype
from moonpool.models.stage import StageModel
from moonpool.sampling.sampler import sample

__all__ = ["PackedBatch", "StageModel", "load_stage", "sample", "torch_dtype"]
