"""Tokenizers, chat templates, stop strings and grammars."""
