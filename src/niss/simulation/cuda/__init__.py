"""Clipping, noise and sums of a round's uploads on the CUDA device where its clients were trained.

`uploads` is the interface of `niss.simulation.uploads` on device memory, `noise` makes the shares of a round, and
`kernels` is the Triton code that makes and adds them in one pass.
"""
