"""HTTP server: OpenAI and Anthropic compatible APIs, a chat page, Prometheus metrics."""
