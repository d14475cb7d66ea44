"""How the cache is kept unless a user says otherwise: settings that docs/quality.md has the evidence for."""

AUTO = "auto"
KV = "k4v4"
# The tiny models of these families bear four bits, too, but none of the real ones was measured. Others report that gpt-oss
# reacts to any rounding of keys; a latent is the key and the value of all heads, and what is chosen by other keys is all coded.
# DeepSeek V4's entries have no codes.
KV_OF = dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_linear", "gpt_oss", "qwen4_exp"), "k8v4") | {"deepseek_v4": "none"}
# positions of coded layers that are read as they are: the first ones, and those nearest to a query
FIRST, NEWEST = 1, 32
CALIBRATE = AUTO
