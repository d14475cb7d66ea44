"""Speculative decoding: draft tokens from n-grams, a draft model or MTP heads, and their verification."""
