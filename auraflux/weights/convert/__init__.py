"""Writing models: MLX folders of quantized weights, and packed experts for offloading."""
