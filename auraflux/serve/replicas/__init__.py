"""Copies of the server behind one address, on Ray Serve: a door reads requests and hands each to a replica.

`beginning.py` says which requests belong together, `replica.py` is the application around one model, `door.py` passes its
answers on and asks another replica where one is gone. Only `door.py` imports ray.
"""
