"""Ollama's API: chat and generate as lines of JSON, and the requests about models."""
