"""The layers of the cache, one file for each kind: dense, quantized, latent, sparse, recurrent."""
