"""The prefix cache: shared prefixes found in a radix tree, in memory and on disk."""
