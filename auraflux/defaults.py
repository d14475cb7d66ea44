"""How the cache is kept unless a user says otherwise: settings that docs/quality.md has the evidence for."""

AUTO = "auto"
KV = "k4v4"
# A GPU keeps no latents as they are, and without that four bits are too few. The tiny gpt-oss bears four; others report that
# the real ones react to any rounding of keys, and none was measured here.
KV_OF = dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_linear", "gpt_oss"), "k8v4")
# positions of coded layers that are read as they are: the first ones, and those nearest to a query
FIRST, NEWEST = 1, 32
CALIBRATE = AUTO
