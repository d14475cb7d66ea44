"""A model with its cache: model runner, graph runner, sampler, key calibration."""
