"""Latent attention (MLA) over quantized latents on CUDA."""
