# Measures every cell of bars-gdn.toml, and judges it.  Needs an idle H200, fla and FlashInfer.
R=gdn-new
Q=qwen3.5-9b,qwen3.5-0.8b,qwen3.5-27b,qwen3.5-397b
ssdprof bench gdn --shape qwen3.5-9b --seq 1 --batch 1,4,16,64,256 --against fla_recurrent --out $R-decoding
ssdprof bench gdn --shape qwen3.5-9b --seq 1k,2k,4k --dtypes all --against fla --out $R-1k
ssdprof bench gdn --shape qwen3.5-397b-tp8 --seq 8k,64k --dtypes all --against fla --out $R-tp8
ssdprof bench gdn --shape olmo-hybrid-7b --seq 8k,64k --cells 8x4k --dtypes all --against fla --out $R-olmo
ssdprof bench gdn --shape qwen3.5-9b --seq 64k --draw quarter-ungated --dtypes all --against fla,flashinfer --out $R-ungated
ssdprof bench gdn --shape qwen3.5-9b --seq 64k,128k --draw normalised --against fla --out $R-normalised
ssdprof bench gdn --shape qwen3.5-9b --seq 8k,64k --impl unfused,fused,fused_portable --out $R-portable
ssdprof bench gdn --shape qwen3.5-9b,qwen3.5-397b --seq 4k --cells 8x4k,32x1k --packed 64x1k-4k --dtypes all --against fla --out $R-batches
ssdprof bench gdn --shape qwen3.5-0.8b,qwen3.5-27b --seq 4k --against fla --out $R-4k
S=4/8x16x16,4/8x32x32,4/8x60x60,4/8x64x64,4/8x100x100,4/8x120x120,4/8x192x192,4/8x256x256,4/8x64x256,4/8x256x64
ssdprof bench gdn --shape $S --seq 1k,8k --cells 8x1k --out $R-sizes
ssdprof bench gdn --shape $Q --seq 8k,...,256k --dtypes all --against fla --out $R
ssdprof bench gdn --impl fused --shape $Q,qwen3.5-397b-tp8 --seq 8k,16k,64k,128k --cells 8x4k,32x1k --check short --against flashinfer --out $R-flashinfer
ssdprof bench gdn --impl fused --shape qwen3.5-9b,qwen3.5-0.8b,qwen3.5-397b-tp8 --seq 8k,32k,64k --draw slow --check short --against flashinfer --out $R-slow
ssdprof bench gdn --impl fused --shape qwen3.5-9b,qwen3.5-397b --seq 32k,64k,128k --draw quarter-slow --check short --against flashinfer --out $R-quarter-slow
ssdprof bench gdn --impl fused --shape qwen3.5-9b,qwen3.5-397b-tp8 --seq 4,8 --batch 1,16,64,256 --against flashinfer_mtp --out $R-verification
ssdprof bench gdn --impl recurrent --shape qwen3.5-9b --verify 4,8 --batch 64,256 --pool 1024 --check short --against flashinfer_mtp --out $R-pools
python benchmarks/check_bars.py $R*
