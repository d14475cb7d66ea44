"""Several models in one server: each in a process of its own, loaded when a request names it, unloaded for another.

`catalog.py` lists the models, `model_pool.py` decides which are loaded, `model_slot.py` is one of them, `files.py` describes
those that are not loaded.
"""
