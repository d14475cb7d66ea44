"""How far a compressed cache moves a model from itself: measured, beside what other engines' caches do to the same model.

`run.evaluate` does it all; `cli/eval.py` is its command. Everything is compared with the uncompressed run of the same weights.
"""
