"""Loading: from a model path or name to a `LanguageModel` that is ready to generate."""
