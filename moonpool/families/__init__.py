"""The model families that can be loaded. All other architectures are refused by name."""

from collections.abc import Mapping

from moonpool.errors import UnsupportedModel
from moonpool.families.arcee import ARCEE
from moonpool.families.base import ModelFamily, TensorNames
from moonpool.families.cohere import COHERE, COHERE2
from moonpool.families.cwm import CWM
from moonpool.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from moonpool.families.dots1 import DOTS1
from moonpool.families.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from moonpool.families.exaone4 import EXAONE4
from moonpool.families.falcon import FALCON
from moonpool.families.gemma import GEMMA, GEMMA2, GEMMA3
from moonpool.families.glm import GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE
from moonpool.families.gpt2 import GPT2, GPT_BIGCODE
from moonpool.families.gpt_neox import GPT_NEOX
from moonpool.families.gpt_oss import GPT_OSS
from moonpool.families.gptj import GPTJ
from moonpool.families.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE, GRANITE_MOE_SHARED, HYPERCLOVAX
from moonpool.families.helium import HELIUM
from moonpool.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from moonpool.families.jais2 import JAIS2
from moonpool.families.kimi_linear import KIMI_LINEAR
from moonpool.families.lfm2 import LFM2, LFM2_MOE
from moonpool.families.llama import LLAMA
from moonpool.families.llama4 import LLAMA4
from moonpool.families.minimax_m2 import MINIMAX_M2
from moonpool.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from moonpool.families.mixtral import MIXTRAL
from moonpool.families.nemotron import NEMOTRON
from moonpool.families.olmo import OLMO, OLMO2, OLMO3, OLMOE
from moonpool.families.opt import OPT
from moonpool.families.other import other_family
from moonpool.families.phi import PHI, PHI3
from moonpool.families.qwen2 import QWEN2, QWEN2_MOE
from moonpool.families.qwen3 import QWEN3, QWEN3_MOE
from moonpool.families.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from moonpool.families.seed_oss import SEED_OSS
from moonpool.families.smollm3 import SMOLLM3
from moonpool.families.stablelm import STABLELM
from moonpool.families.starcoder2 import STARCODER2

_ALL = (
    ARCEE,
    COHERE,
    COHERE2,
    CWM,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DOTS1,
    ERNIE4_5,
    ERNIE4_5_MOE,
    EXAONE4,
    FALCON,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GLM,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT2,
    GPTJ,
    GPT_BIGCODE,
    GPT_NEOX,
    GPT_OSS,
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    HELIUM,
    HUNYUAN,
    HUNYUAN_MOE,
    HYPERCLOVAX,
    JAIS2,
    KIMI_LINEAR,
    LFM2,
    LFM2_MOE,
    LLAMA,
    LLAMA4,
    MINIMAX_M2,
    MISTRAL,
    MINISTRAL,
    MINISTRAL3,
    MIXTRAL,
    NEMOTRON,
    OLMO,
    OLMO2,
    OLMO3,
    OLMOE,
    OPT,
    PHI,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    QWEN3_MOE,
    SEED_OSS,
    SMOLLM3,
    STABLELM,
    STARCODER2,
)
FAMILIES: Mapping[str, ModelFamily] = {name: it for it in _ALL for name in (it.architecture, *it.other_architectures)}
"""By architecture, as config.json names the architecture."""

_BY_MODEL_TYPE = {it.model_type: it for it in _ALL}
_BY_GGUF = {it.gguf.architecture: it for it in _ALL if it.gguf is not None and it not in (MIXTRAL, DEEPSEEK_V3)}


def family_of(declared: object, model_type: object) -> ModelFamily:
    """Return the family that config.json names in `architectures`, or else (None) in `model_type`.

    An architecture that is not described here, but is a decoder by its name, is computed by transformers' own code.

    Raises:
        UnsupportedModel: the family is not known; names the key.
    """
    if declared is None:
        if not isinstance(model_type, str) or model_type not in _BY_MODEL_TYPE:
            raise UnsupportedModel("model_type", f"{model_type!r} is none of {', '.join(_BY_MODEL_TYPE)}")
        return _BY_MODEL_TYPE[model_type]
    names = declared if isinstance(declared, list) else [declared]
    name = names[0] if len(names) == 1 else None
    family = FAMILIES.get(str(name)) or (other_family(name, model_type) if isinstance(name, str) else None)
    if family is None:
        raise UnsupportedModel("architectures", f"{declared!r} is no decoder, as {', '.join(FAMILIES)} are")
    return family


def names_of(architecture: str) -> TensorNames:
    """Return the names of a family's tensors; for an architecture that is not described here, the usual names."""
    family = FAMILIES.get(architecture)
    return TensorNames() if family is None else family.names


def gguf_family(name: object) -> ModelFamily:
    """Return the family for a GGUF file's `general.architecture` value.

    Raises:
        UnsupportedModel: the family is not known.
    """
    if not isinstance(name, str) or name not in _BY_GGUF:
        raise UnsupportedModel("general.architecture", f"{name!r} is none of {', '.join(_BY_GGUF)}")
    return _BY_GGUF[name]
