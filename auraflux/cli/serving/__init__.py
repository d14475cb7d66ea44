"""Serving beyond one model: several models in one server, and batches of requests without a server."""
