"""Fields of other servers' request bodies that Moonpool knows and does not honour, with what happens to each.

A field that Moonpool honours is an attribute of a body (`moonpool/gateway/endpoints`). docs/fields.md lists all fields;
`python -m tools.gen_fields` writes the page. A test finds every field in OpenAI's and Anthropic's SDKs in one of them.

An *ignored* field does not change the answer, and the response names the field in a warning. A *refused* field would
change the answer; the values beside the name are accepted, because they ask for what happens anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Refused = Mapping[str, tuple[Any, ...]]
"""Names of refused fields, each with the values that are accepted. Null is always accepted."""

OPENAI_IGNORED = (
    "metadata",
    "prediction",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
)
OPENAI_REFUSED: Refused = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
VLLM_IGNORED = (
    "disable_fallback",
    "guided_decoding_backend",
    "include_reasoning",
    "request_id",
    "return_mm_kwargs",
    "return_token_offsets",
    "stream_interval",
)
VLLM_REFUSED: Refused = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "ec_transfer_params": ({},),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": ([],),
    "repetition_detection": ({},),
    "return_prompt_text": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
SGLANG_IGNORED = (
    "custom_labels",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "reasoning",
    "rid",
    "routed_dp_rank",
    "separate_reasoning",
    "stream_reasoning",
)
SGLANG_REFUSED: Refused = {
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "extra_key": (),
    "images_config": ({},),
    "input_ids": (),
    "lora_path": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "ngram_corpus_id": (),
    "no_stop_trim": (False,),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "session_params": ({},),
    "stop_regex": ("", []),
    "task": (),
    "use_audio_in_video": (False,),
}
LLAMA_CPP_IGNORED = (
    "cache_prompt",
    "dry_allowed_length",
    "dry_base",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "id_slot",
    "mirostat_eta",
    "mirostat_tau",
    "reasoning_format",
    "repeat_last_n",
    "return_progress",
    "timings_per_token",
    "xtc_threshold",
)
LLAMA_CPP_REFUSED: Refused = {
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "image_data": ([],),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "parse_tool_calls": (True,),
    "post_sampling_probs": (False,),
    "preserved_tokens": ([],),
    "repeat_penalty": (1,),
    "response_fields": ([],),
    "return_tokens": (False,),
    "samplers": ([],),
    "t_max_predict_ms": (0, -1),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
OTHER_IGNORED = ("enable_thinking", "keep_alive", "provider", "think", "thinking", "transforms", "usage")
"""Of Ollama, OpenRouter, DeepSeek, Moonshot and Qwen's own service."""
OTHER_REFUSED: Refused = {
    "data_sources": ([],),
    "format": ("",),
    "images": ([],),
    "models": ([],),
    "options": ({},),
    "plugins": ([],),
    "random_seed": (),
    "raw": (False,),
    "safe_prompt": (False,),
    "search_parameters": (),
    "system": ("",),
    "template": ("",),
    "top_a": (0,),
}
"""Of Ollama, OpenRouter, Mistral, Azure and xAI."""

COMPLETION_IGNORED = (*OPENAI_IGNORED, *VLLM_IGNORED, *SGLANG_IGNORED, *LLAMA_CPP_IGNORED, *OTHER_IGNORED)
"""Ignored in `/v1/chat/completions` and `/v1/completions`."""
COMPLETION_REFUSED: Refused = {
    **OPENAI_REFUSED,
    **VLLM_REFUSED,
    **SGLANG_REFUSED,
    **LLAMA_CPP_REFUSED,
    **OTHER_REFUSED,
}
"""Refused in `/v1/chat/completions` and `/v1/completions`."""

KEPT_BY_CLIENTS = (
    "cache_control",
    "created_at",
    "extra_content",
    "extras",
    "id",
    "index",
    "metadata",
    "model",
    "provider_metadata",
    "provider_specific_fields",
    "thought_signature",
    "timestamp",
)
"""What clients keep beside messages, parts, calls and items, and send back with a history."""
MESSAGE_IGNORED = (
    *KEPT_BY_CLIENTS,
    "annotations",
    "name",
    "parsed",
    "reasoning",
    "reasoning_content",
    "reasoning_details",
    "reasoning_items",
    "reasoning_opaque",
    "reasoning_signature",
    "reasoning_text",
    "stop_reason",
    "thinking",
    "thinking_blocks",
    "thinking_signature",
    "token_ids",
    "tool_name",
    "weight",
)
MESSAGE_REFUSED: Refused = {
    "audio": (),
    "documents": ([],),
    "files": ([],),
    "function_call": (),
    "images": ([],),
    "partial": (False,),
    "prefix": (False,),
    "tools": ([],),
    "videos": ([],),
}
PART_IGNORED = (
    *KEPT_BY_CLIENTS,
    "annotations",
    "citations",
    "encrypted_content",
    "logprobs",
    "name",
    "parsed",
    "prompt_cache_breakpoint",
    "signature",
    "thinking",
)
CALL_IGNORED = (*KEPT_BY_CLIENTS, "caller", "parsed_arguments")
"""In calls of functions, and in the functions that they name."""

RESPONSES_IGNORED = (
    "context_management",
    "max_tool_calls",
    "request_id",
    "safety_identifier",
    "service_tier",
    "truncation",
    "user",
)
RESPONSES_REFUSED: Refused = {
    "access_programs": ({},),
    "background_options": ({},),
    "enable_response_messages": (False,),
    "image": ({},),
    "include_stop_str_in_output": (False,),
    "mm_processor_kwargs": ({},),
    "moderation": (),
    "previous_input_messages": ([],),
    "previous_response": (),
    "prompt": (),
    "vllm_xargs": ({},),
}
ITEM_IGNORED = (
    *CALL_IGNORED,
    "agent",
    "async",
    "created_by",
    "encrypted_content",
    "end_turn",
    "logprobs",
    "namespace",
    "phase",
    "provider_data",
    "status",
    "summary",
    "token_ids",
)

ANTHROPIC_IGNORED = (
    "betas",
    "billing_policy",
    "compaction",
    "context_management",
    "diagnostics",
    "fallback_credit_token",
    "fallbacks",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "thinking",
    "user_profile_id",
    "workspace_id",
)
ANTHROPIC_REFUSED: Refused = {"container": (), "mcp_servers": ([],), "output_format": (), "thread": ()}
ANTHROPIC_MESSAGE_IGNORED = (
    *KEPT_BY_CLIENTS,
    "clear_at",
    "container",
    "context_management",
    "stop_details",
    "stop_reason",
    "stop_sequence",
    "type",
    "usage",
)
"""In messages, which may be the answers of earlier requests as they came."""
BLOCK_IGNORED = (*PART_IGNORED, "caller", "data", "is_error", "toolset_name")
