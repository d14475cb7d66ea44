"""One model on several processes or machines, which talk through torch.distributed.

Rank 0 reads prompts, chooses tokens and decides what happens to the cache; the others follow. See docs/distributed.md.
"""
