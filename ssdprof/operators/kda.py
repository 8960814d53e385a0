"""The record of the operator "kda".  torch is imported only when it is first used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ssdprof import kernels
from ssdprof.operators import gdn, gdn_inputs, generate
from ssdprof.operators.generate import installed_library
from ssdprof.operators.kda_inputs import WAYS, draw, edges, histories
from ssdprof.operators.kda_oracle import ORACLE
from ssdprof.operators.late import deferred, lazy, packages
from ssdprof.operators.operator import CallBinding, Stages, computed
from ssdprof.operators.tensors import exact_fp32, states_as_inputs

if TYPE_CHECKING:
    from ssdprof.operators import kda_tuning
else:
    kda_tuning = lazy("ssdprof.operators.kda_tuning")

STAGES = Stages.of("kda")

# --- how a model calls it


def gate_bytes(item: int, sizes: Mapping[str, int]) -> int:
    """`CallBinding.gate_bytes`: a beta in the model's dtype, and a g in fp32 for each channel, also
    for models whose g is in their own dtype.
    """
    return item + 4 * sizes["key_dim"]


bind = partial(gdn.bind, kind="KDAInputs")  # a call for a prompt, or for a step
BINDING: CallBinding[kernels.KDAInputs] = CallBinding(
    function="chunk_kimi_delta_attention",
    step="recurrent_kimi_delta_attention",
    bind=bind,
    bind_step=bind,
    refused=(*gdn.BINDING.refused, "safe_gate", "lower_bound"),
    always_a_pair=True,
    views=("q", "k", "v"),
    per_position=("g", "beta"),
    gate_bytes=gate_bytes,
    replacement=partial(computed, deferred("kda.reference:kda_chunked")),
)


# --- other libraries

LIBRARIES = {
    **gdn.fla_libraries("kda"),
    "flash_kda": installed_library(
        "git+https://github.com/MoonshotAI/FlashKDA",
        deferred("gdn.adapters:load_flash_kda"),
        states_as_inputs,
        version=lambda: packages.package_version("flash_kda"),
    ),
    **gdn.of_servers("kda"),
    "cudnn": installed_library(
        "nvidia-cudnn-frontend", deferred("gdn.adapters:load_cudnn"), exact_fp32
    ),
    **gdn.of_transformers("kda"),
}

GENERATOR = replace(
    gdn_inputs.GENERATOR,
    draw=draw,
    edges=edges,
    histories=histories,
    ways=WAYS,
    alternatives=(),
    models=generate.models_of("kda"),
)


OPERATOR = replace(
    gdn.OPERATOR,
    name="kda",
    title="KDA",
    layers="Kimi-Delta-Attention",
    served="prompts: flash_kda (vLLM, bounded gates), else vllm, sglang; "
    "steps: vllm_step, sglang_step",
    load_inputs=lambda: kernels.KDAInputs,
    mixer_sizes={
        "key_heads": "num_heads",
        "value_heads": "num_heads",
        "key_dim": "head_dim",
        "value_dim": "head_dim",
    },
    stages=STAGES,
    binding=BINDING,
    oracle=ORACLE,
    generated=GENERATOR,
    libraries=LIBRARIES,
    load_tuning=lambda: kda_tuning.TUNING,
    load_definitions=tuple,
)
