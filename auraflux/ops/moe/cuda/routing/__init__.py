"""Expert routing on CUDA: top-k, grouping of (token, expert) pairs, and the sum into the residual stream."""
