"""The SSD (Mamba-2) operator.

inputs.py         arguments and results of a call
reference.py      the oracle
unfused/          five launches: the baseline
fused.py          one launch: the public function, and the choice of the kernel
hopper/           the fused kernel for Hopper
portable/         the fused kernel for every other GPU, and for the interpreter
buffers.py        outputs and workspace of a fused kernel
config_table.py   the configuration of each kernel, with reasons
tuned.py          configurations that a search has found, which take precedence over the table
compat.py         the fused kernel with the signature of mamba_ssm
adapters/         kernels of other libraries
"""
