"""Gluon kernels on numpy: Triton's interpreter does not run Gluon, and there need be no GPU.

The kernels are the imported ones. `rebind.py` makes Python functions of them and of all they call, in which `gl` and `tl` mean
an emulator, and a few named helpers a stand-in; the package itself stays as it is.

    gluon.py    a program as one: tensors are arrays of any shape; products, reductions, look-ups and copies in PTX
    threads.py  a program as threads side by side: every tensor has one element per thread
    ptx.py      for these, pieces of PTX statement by statement: bits, shuffles, votes, mma, loads, stores, cp.async
    cluster.py  programs of a cluster side by side: shared memory of others, wgmma
    experts.py  the expert kernels: typed pointers, TMA copies, counts that threads and programs keep together

What is not emulated: layouts mean nothing (the compiler checks them). Copies are done when they are asked for, so barriers,
fences, waits and PDL do nothing, and a missing one is not noticed. Programs run one after the other. Registers, speed and
`num_warps` do not exist. Reading or writing outside of the tensors given fails.
"""
