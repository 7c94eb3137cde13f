"""Flags of vLLM and SGLang, by name, and the flags to use instead: suggestions for error messages."""

from collections.abc import Mapping

_VLLM = {
    "api_key": "api_keys_file",
    "api_server_count": "gateways",
    "block_size": "page_size",
    "data_parallel_size": "dp_size",
    "enable_auto_tool_choice": "tool_call_parser",
    "enable_expert_parallel": "expert_parallel",
    "enable_prefix_caching": "prefix_caching",
    "enforce_eager": "use_cudagraphs",
    "gpu_memory_utilization": "kv_cache_num_tokens",
    "max_logprobs": "max_top_logprobs",
    "max_model_len": "max_context_tokens",
    "max_num_batched_tokens": "max_tokens_per_forward",
    "max_num_seqs": "max_seqs_per_forward",
    "no_enable_prefix_caching": "prefix_caching",
    "pipeline_parallel_size": "pp_size",
    "ssl_certfile": "http_cert",
    "ssl_keyfile": "http_key",
    "tensor_parallel_size": "tp_size",
}
_SGLANG = {
    "chunked_prefill_size": "max_tokens_per_forward",
    "context_length": "max_context_tokens",
    "cuda_graph_max_bs": "cudagraph_max_size",
    "disable_cuda_graph": "use_cudagraphs",
    "disable_radix_cache": "prefix_caching",
    "dp": "dp_size",
    "enable_torch_compile": "torch_compile",
    "ep_size": "expert_parallel",
    "max_running_requests": "max_seqs_per_forward",
    "max_total_tokens": "kv_cache_num_tokens",
    "mem_fraction_static": "kv_cache_num_tokens",
    "model_path": "model",
    "pp": "pp_size",
    "tokenizer_path": "tokenizer",
    "tp": "tp_size",
}
OTHER_ENGINES: Mapping[str, str] = _VLLM | _SGLANG
