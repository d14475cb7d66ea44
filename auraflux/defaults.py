"""Default settings of the KV cache; docs/quality.md has the evidence for them."""

AUTO = "auto"
KV = "k4v4"
KV_BITS = (2, 3, 4, 6, 8)  # of keys and of values
# Tiny models of these families tolerate four bits, but no released one was measured. gpt-oss is reported to be sensitive to any
# quantization of keys. A latent is key and value of all heads, and selected tokens are all quantized. DeepSeek V4 entries have
# no quantized form.
KV_OF = dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_linear", "gpt_oss", "qwen4_exp"), "k8v4") | {"deepseek_v4": "none"}
# full-precision tokens of quantized layers: the first ones, and those nearest to a query
SINK_TOKENS, RECENT_WINDOW = 1, 32
CALIBRATE = AUTO
CALIBRATIONS = (AUTO, "off")  # what --calibrate may be, besides a file
WEIGHT_BITS = (2, 3, 4, 5, 6, 8)  # of weights quantized at load
