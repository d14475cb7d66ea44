"""How the cache is kept unless a user says otherwise: settings that docs/quality.md has the evidence for."""

AUTO = "auto"
KV = "k4v4"
# the tiny one bears four bits; others report that the real ones react to any rounding of keys, and none was measured here
KV_OF = {"gpt_oss": "k8v4"}
# positions of coded layers that are read as they are: the first ones, and those nearest to a query
FIRST, NEWEST = 1, 32
CALIBRATE = AUTO
