"""The SSD (Mamba-2) operator.

inputs.py         what a call takes and returns
reference.py      the oracle
unfused/          five launches: the baseline
fused.py          one launch: the public function, and the choice between the two kernels
hopper/           the fused kernel for Hopper
portable/         the fused kernel for every other GPU, and for the interpreter
buffers.py        what a call of a fused kernel allocates
config_table.py   which configuration each kernel takes, and why
tuned.py          configurations that were found by a search, which come before the table's
compat.py         the fused kernel behind the signature of mamba_ssm
adapters/         kernels of other libraries
"""
