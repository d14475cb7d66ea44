"""Replicas of the server behind one address, on Ray Serve: a router forwards each request to a replica.

`prefix_affinity.py` maps requests with a common prefix to one replica, `replica.py` is the application around one model,
`router.py` forwards responses and retries on another replica if one is lost. Only `router.py` and `node_port.py` import ray.
"""
