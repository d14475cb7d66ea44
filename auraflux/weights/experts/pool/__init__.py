"""Experts in pinned host memory, with a pool of GPU slots that caches them."""
