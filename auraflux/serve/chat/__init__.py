"""A conversation in the form that every API shares: the prompt, the parsed output, structured output."""
