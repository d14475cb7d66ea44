"""Experts of mixture layers: resident in memory, or offloaded to disk behind an expert cache.

load_layer      experts of a layer from any checkpoint layout
resident        all experts in memory, and the interface of a layer's experts
offloaded       experts behind a cache: hits, misses, prefetch
expert_cache    slots of host memory and the eviction policy
pool            slots of GPU memory over experts in pinned host memory, or on disk below it
disk_reader     O_DIRECT reads, several in flight
store           the experts of a whole model within a memory budget
packed_files    expert files on disk and their manifest
row_table       embedding tables that stay on disk
"""
