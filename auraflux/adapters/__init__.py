"""Adapters (LoRA): small trained matrices that change a model's linear layers for the requests that name them."""
