"""The HTTP process, the model process and the pipe between them; request bodies and server-sent events."""
