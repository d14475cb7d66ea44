"""How the cache is kept unless a user says otherwise: settings that docs/quality.md has the evidence for."""

AUTO = "auto"
KV = "k4v4"
# families that are known to bear less, until they are measured here
KV_OF = {"deepseek_v3": "k8v4", "gpt_oss": "k8v4"}
# positions of coded layers that are read as they are: the first ones, and those nearest to a query
FIRST, NEWEST = 1, 32
CALIBRATE = AUTO
