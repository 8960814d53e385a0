# Measures every cell of bars-ssd.toml, and judges it.  Needs an idle H200, mamba_ssm, and a checkout of the published
# kernel in ~/mamba.
R=ssd-new
M=mamba2-2.7b,granite-4.0-h-small,nemotron-3-nano
O=nemotron-nano-9b-v2,codestral-mamba-7b,falcon-h1-3b,zamba2-2.7b,zamba2-7b
P="--dtype fp16 --against published=$HOME/mamba"
ssdprof bench ssd --shape mamba2-2.7b --seq 1 --batch 1,4,16,64,256 --against selective_state_update --impl unfused,fused,recurrent_in_place --out $R-decoding
ssdprof bench ssd --shape nemotron-3-nano --seq 4k,128k $P --out $R-published-nemotron-3-nano
ssdprof bench ssd --shape granite-4.0-h-small --seq 4k,32k,128k $P --out $R-published-granite-4.0-h-small
ssdprof bench ssd --shape mamba2-2.7b --seq 1k,4k,16k,64k,128k,256k --cells 32x1k,8x4k $P --out $R-published-mamba2-2.7b
ssdprof bench ssd --shape mamba2-2.7b,$O --seq 4k --packed 64x1k-4k --out $R-packed
ssdprof bench ssd --shape $O --seq 4k,64k --against mamba_ssm --out $R-other-shapes
ssdprof bench ssd --shape $M --seq 1k,...,256k --cells 32x1k,8x4k --dtypes all --states fp32,bf16 --against mamba_ssm --out $R
python benchmarks/check_bars.py $R*
