"""Op benchmarks on a GPU: shapes of real models as CUDA graphs, with the measured peaks of the same run and other libraries."""
