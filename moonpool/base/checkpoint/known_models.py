"""Names of models as users of Ollama type them, and the hub repositories that hold them."""

import difflib
from collections.abc import Mapping

from moonpool.base.checkpoint.named_models import BUNDLED, MODEL_PACKAGES

_HUB: Mapping[str, Mapping[str, str]] = {
    "deepseek-r1": {
        "8b": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
        "1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        "14b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
        "32b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
        "70b": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    },
    "gemma3": {"1b": "google/gemma-3-1b-it"},
    "gpt-oss": {"20b": "openai/gpt-oss-20b", "120b": "openai/gpt-oss-120b"},
    "gpt2": {"": "openai-community/gpt2", "xl": "openai-community/gpt2-xl"},
    "granite3.3": {"8b": "ibm-granite/granite-3.3-8b-instruct", "2b": "ibm-granite/granite-3.3-2b-instruct"},
    "llama3.1": {"8b": "meta-llama/Llama-3.1-8B-Instruct", "70b": "meta-llama/Llama-3.1-70B-Instruct"},
    "llama3.2": {"3b": "meta-llama/Llama-3.2-3B-Instruct", "1b": "meta-llama/Llama-3.2-1B-Instruct"},
    "llama3.3": {"70b": "meta-llama/Llama-3.3-70B-Instruct"},
    "mistral": {"7b": "mistralai/Mistral-7B-Instruct-v0.3"},
    "olmo2": {"7b": "allenai/OLMo-2-1124-7B-Instruct", "13b": "allenai/OLMo-2-1124-13B-Instruct"},
    "phi3": {"3.8b": "microsoft/Phi-3-mini-4k-instruct"},
    "phi4": {"14b": "microsoft/phi-4"},
    "phi4-mini": {"3.8b": "microsoft/Phi-4-mini-instruct"},
    "qwen2.5": {
        size: f"Qwen/Qwen2.5-{size.upper()}-Instruct" for size in ("7b", "0.5b", "1.5b", "3b", "14b", "32b", "72b")
    },
    "qwen2.5-coder": {
        size: f"Qwen/Qwen2.5-Coder-{size.upper()}-Instruct" for size in ("7b", "0.5b", "1.5b", "3b", "14b", "32b")
    },
    "qwen3": {
        **{size: f"Qwen/Qwen3-{size.upper()}" for size in ("8b", "0.6b", "1.7b", "4b", "14b", "32b")},
        "30b": "Qwen/Qwen3-30B-A3B",
    },
    "qwq": {"32b": "Qwen/QwQ-32B"},
    "smollm2": {"360m": "HuggingFaceTB/SmolLM2-360M-Instruct", "1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct"},
    "smollm3": {"3b": "HuggingFaceTB/SmolLM3-3B"},
    "tinyllama": {"1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"},
}
"""Hub id by size, by name; the first size is what the name alone means, unless a package has the name."""
_SAME = {"smollm2:135m": "smollm2", "gemma3:270m": "gemma3"}
"""Names that mean a package."""
_IN_PACKAGES = (BUNDLED, *MODEL_PACKAGES)
_NEAR = 3
"""Similar names that an error lists."""


def known_sizes() -> Mapping[str, Mapping[str, str]]:
    """Hub ids by size, by name."""
    return _HUB


def known_models() -> dict[str, str]:
    """Hub ids by name, in the order of names: for example qwen3:0.6b and qwen3, which is the first of its sizes."""
    found: dict[str, str] = {}
    for name, sizes in _HUB.items():
        if name not in _IN_PACKAGES:
            found[name] = next(iter(sizes.values()))
        found |= {f"{name}:{size}": hub_id for size, hub_id in sizes.items() if size}
    return found


def plain_name(model: str) -> str:
    """The hub id or package that a user's name stands for; other texts come back as they are.

    Capital letters and Ollama's tag `:latest` make no difference.
    """
    name = model.lower().removesuffix(":latest")
    if name in _IN_PACKAGES:
        return name
    return _SAME.get(name) or known_models().get(name) or model


def near_names(model: str) -> list[str]:
    """Known names that are most like `model`, the likeliest first."""
    names = [*_IN_PACKAGES, *_SAME, *known_models()]
    wanted = model.lower().removesuffix(":latest")
    base = wanted.partition(":")[0]
    sizes = [name for name in names if name.partition(":")[0] == base]
    return (sizes or difflib.get_close_matches(wanted, names, n=_NEAR, cutoff=0.5))[: 2 * _NEAR]
