"""Distributed inference: one model on several processes or machines, through torch.distributed.

Rank 0, the leader, schedules, samples and manages the KV cache; the other ranks follow. See docs/distributed.md.
"""
