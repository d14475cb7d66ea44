"""How fast a server answers many at once: clients in processes of their own, and figures from what they saw.

Nothing here imports torch: what measures must not take the cores of what is measured.
"""
