"""What the files of the folder agree on: special tokens, the context, and the sizes of the model (``config.json``).

Knows neither tokenizer nor torch.
"""

from __future__ import annotations

import dataclasses

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
#: Tokens that the model can attend to.
CONTEXT = 8192


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of the model, under the names of a Hugging Face Llama configuration."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-5

    def config(self) -> dict[str, object]:
        """Return the content of ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **dataclasses.asdict(self),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": CONTEXT,
            "mlp_bias": False,
            "pad_token_id": PAD_ID,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
