"""Instructions of Hopper as small functions: copies, barriers, tensor-core products, warp reductions."""
