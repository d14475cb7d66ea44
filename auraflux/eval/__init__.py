"""Quality of a quantized KV cache, compared with the KV caches of other engines on the same model.

`run.Evaluation` runs all tasks; `cli/eval.py` is its command. The reference is the uncompressed KV cache with the same weights.
"""
