"""The engine of a CUDA device: all clients of a round as one stacked computation in a CUDA graph.

`engine` chooses the formulation and holds what is resident on the device; `program` has the table of batches, the
step in plain torch and the graph; `mlp` and `cnn` launch the Triton kernels of `kernels` and `conv_kernels`;
`evaluation` scores a model on a test set.
"""
