"""Write a model as transformers initialises it, at real sizes, in whose layers every fourth head
hardly forgets.

    python benchmarks/slow_heads.py kimi_linear|mamba2|qwen3_next FOLDER

Two layers of Kimi-Linear-48B's, Mamba2-2.7B's or Qwen3-Next's recurrent layers, with a byte-level
tokenizer.  Nothing was trained: gates and keys are those of random weights.
"""

import sys
from pathlib import Path

import torch
from make_random_checkpoint import write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

LINEAR = dict(layer_types=["linear_attention"] * 2, mlp_layer_types=["dense"] * 2)
SIZES = {
    "kimi_linear": LINEAR,
    "mamba2": dict(hidden_size=2560, num_heads=80, head_dim=64, n_groups=1, state_size=128),
    "qwen3_next": LINEAR | dict(mlp_only_layers=[0, 1]),
}
SLOW = -12.0  # A_log, so that a gate is -6e-6 times its time step

if __name__ == "__main__":
    model_type, folder = sys.argv[1:]
    torch.manual_seed(0)
    sizes = dict(vocab_size=256, num_hidden_layers=2, pad_token_id=0, ssdprof_random_weights=True)
    config = AutoConfig.for_model(model_type, **sizes, **SIZES[model_type])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.data.flatten()[::4] = SLOW
    model.save_pretrained(folder)
    write_tokenizer(Path(folder))
