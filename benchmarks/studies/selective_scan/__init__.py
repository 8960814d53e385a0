"""Study scan-003: a selective scan with one decay and one channel per head, h_t = decay_t h_{t-1} + B_t x_t.

inputs.py               inputs of all kernels; random inputs; the bytes that must move
reference.py            the scan in fp64, its gradients by autograd, and the allowed errors
sequential.py           position after position; keeps the state at the head of each tile
sequential_backward.py  replays each tile from there, then walks back
parallel.py             an associative scan of each tile; keeps every state
parallel_backward.py    an associative scan of each tile from its end, over the states that were kept
autograd.py             each pair as a function that torch differentiates
"""
