"""The transformer: weights of a stage, one forward over a packed batch, the sampler, random checkpoints.

Needs torch. Owns what is computed; it must not know processes, requests, gRPC or where KV blocks come from.
"""

from moonpool.model.batch import PackedBatch
from moonpool.model.load import load_stage, torch_dtype
from moonpool.model.sampler import sample
from moonpool.model.stage import StageModel

__all__ = ["PackedBatch", "StageModel", "load_stage", "sample", "torch_dtype"]
