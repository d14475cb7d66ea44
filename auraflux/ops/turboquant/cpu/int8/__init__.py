"""Attention on codes in int8. `attend` has the blocks of a work item; `key_scores` and `value_sums` its inner loops."""
