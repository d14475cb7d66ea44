"""Default settings of the KV cache (docs/quality.md has the evidence for them) and of sampling (docs/sampling.md)."""

AUTO = "auto"
KV = "k4v4"
KV_BITS = (2, 3, 4, 6, 8)  # of keys and of values
# Tiny models of these families tolerate four bits, but no released one was measured. gpt-oss is reported to be sensitive to any
# quantization of keys. A latent is key and value of all heads, and selected tokens are all quantized. DeepSeek V4 entries have
# no quantized form.
KV_OF = dict.fromkeys(("deepseek_v3", "deepseek_v32", "hy_v4", "kimi_linear", "gpt_oss", "qwen4_exp", "minimax_m3_vl"), "k8v4")
# nor have keys and values of different widths
KV_OF |= dict.fromkeys(("deepseek_v4", "mimo_v2_flash"), "none")
# full-precision tokens of quantized layers: the first ones, and those nearest to a query
SINK_TOKENS, RECENT_WINDOW = 1, 32
# on a CPU they are stored in bf16, which halves their memory: most conversations begin uncompressed
CPU_RECENT_WINDOW = 128
CALIBRATE = AUTO
CALIBRATIONS = (AUTO, "off")  # what --calibrate may be, besides a file
WEIGHT_BITS = (2, 3, 4, 5, 6, 8)  # of weights quantized at load

TEMPERATURE = 0.7  # of models that recommend none
# what publishers recommend, for files that do not say it: model_type, a part of the model's name, settings
SAMPLING_OF: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("llama", "SmolLM2", {"temperature": 0.2, "top_p": 0.9}),
    ("llama", "Llama-3", {"temperature": 0.6, "top_p": 0.9}),
    ("qwen2", "Qwen2.5", {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
    ("qwen3", "Qwen3", {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
    ("qwen3_moe", "Qwen3", {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
    ("gemma3", "Gemma", {"temperature": 1.0, "top_p": 0.95, "top_k": 64}),
    ("gemma3_text", "Gemma", {"temperature": 1.0, "top_p": 0.95, "top_k": 64}),
    ("gpt_oss", "gpt-oss", {"temperature": 1.0}),
)
