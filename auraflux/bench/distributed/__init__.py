"""Speed of a model on several machines: forecast from sizes and bandwidths, or measured on ranks of this machine."""
