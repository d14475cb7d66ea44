"""An HTTP server for the clients people have: OpenAI's and Anthropic's APIs, a chat page, metrics."""
