"""Attention by cp.async and mma.sync, for GPUs without wgmma."""
