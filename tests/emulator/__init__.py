"""Gluon kernels on numpy: Triton's interpreter does not run Gluon, and CI has no GPU.

The kernels are the imported ones. `rebind.py` makes Python functions of them and of all they call, in which `gl` and `tl` mean
an emulator, and a few named helpers a stand-in; the package itself is not modified.

    gluon.py    a program as a unit: tensors are arrays of any shape; products, reductions, look-ups and copies in PTX
    threads.py  a program as threads: every tensor has one element per thread
    ptx.py      for these, PTX statement by statement: bits, shuffles, votes, mma, loads, stores, cp.async
    cluster.py  programs of a cluster: distributed shared memory, wgmma
    experts.py  the expert kernels: typed pointers, TMA copies, counters shared by threads and programs

Not emulated: layouts (the compiler checks them); asynchrony: copies complete when requested, so barriers, fences, waits and PDL
do nothing, and a missing one goes unnoticed; concurrency: programs run one after the other; registers, speed and `num_warps`.
Access outside of the given tensors fails.
"""
