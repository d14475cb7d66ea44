"""The load of `auraflux bench serve`: clients in worker processes, and TTFT, ITL and throughput from their records.

Nothing here imports torch: the load generator must not take cores from the server.
"""
