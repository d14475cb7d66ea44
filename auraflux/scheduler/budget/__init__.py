"""The prefill budget: prompt tokens that a step may take while sequences decode."""
