"""Study scan-002: the state that passes from chunk to chunk, h_c = A_c h_{c-1} + states_c, in several kernels.

inputs.py                inputs of all kernels; random inputs; the bytes that must move
reference.py             the recurrence in fp64, and with the roundings that a kernel may have
block.py                 the part of a state that a program owns
loop.py                  one launch, a loop over chunks: state in registers, or read back in every iteration
one_launch_a_chunk.py    a launch for each chunk
chained.py               a program for each chunk, which waits for the chunk before (atomic flags)
associative.py           an associative scan over tiles of chunks
look_back.py             segments of chunks in parallel, which pass on their sums with flags
peer.py                  mamba_ssm's state pass, which keeps its state in registers
low_rank.py              the loop with A_c = diag(decay) (I - W Y^T)
"""
