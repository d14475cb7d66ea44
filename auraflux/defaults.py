"""How the cache is kept unless a user says otherwise: settings that docs/quality.md has the evidence for."""

KV = "k4v4"
# positions of coded layers that are read as they are: the first ones, and those nearest to a query
FIRST, NEWEST = 1, 32
CALIBRATE = "auto"
