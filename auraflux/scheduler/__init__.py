"""Continuous batching: queue, admission, chunked prefill, decode, preemption."""
