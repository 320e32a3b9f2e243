"""Metrics of LMDeploy 0.18 and of Prometheus' client library that the dashboards and rules read.

The list lets a test check queries against what exists; it defines nothing.
"""

from typing import Final

LMDEPLOY: Final[dict[str, str]] = {
    "lmdeploy:num_requests_running": "requests in the engine's batch",
    "lmdeploy:num_requests_waiting": "requests waiting in the engine",
    "lmdeploy:gpu_cache_usage_perc": "share of the engine's KV pool in use",
    "lmdeploy:time_to_first_token_seconds": "histogram, measured in the api_server",
    "lmdeploy:time_per_output_token_seconds": "histogram",
    "lmdeploy:iter_token_latency": "histogram of seconds between two tokens of one answer (ITL)",
    "lmdeploy:request_queue_time_seconds": "histogram of seconds in the engine's queue",
    "lmdeploy:request_prefill_time_seconds": "histogram",
    "lmdeploy:request_decode_time_seconds": "histogram",
    "lmdeploy:request_prompt_tokens": "histogram of prompt lengths",
    "lmdeploy:prompt_tokens_total": "prompt tokens",
    "lmdeploy:generation_tokens_total": "generated tokens",
    "process_cpu_seconds_total": "CPU time, of the gateway and of the api_server process",
    "process_resident_memory_bytes": "main memory, of the gateway and of the api_server process",
    "up": "1 if Prometheus could scrape the target",
}
