"""A table of published checkpoints, and the family names that users type for them.

Every number of parameters has its source.  A checkpoint's config takes precedence over this table, which is for
`ssdprof models`, family names, and hints on siblings that fit a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from ssdprof.checkpoint.layer_dims import LayerDims, SSDLayerDims
from ssdprof.checkpoint.sizes_of_layers import GDNSizes  # TODO

CARD = "rounded figure of the name or model card"
FILE_SIZE = "size of the weights on the hub, 2 bytes each"


@dataclass(frozen=True, kw_only=True)
class KnownCheckpoint:
    """One repo.  None: unknown."""

    repo: str
    parameters: int  # of the whole model
    parameters_from: str
    operator_layers: int | None = None
    layers: int | None = None
    dims: LayerDims | None = None
    trained_context: int | None = None  # tokens, if it differs from the config's max_position_embeddings

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model in 16 bit."""
        return 2 * self.parameters


@dataclass(frozen=True, kw_only=True)
class FamilyRow:
    """One family: checkpoints of one `model_type`, smallest first.

    typed: family names that users type and that are not repos.  flagship: the repo used for them.
    """

    title: str
    model_type: str
    operator: str
    checkpoints: tuple[KnownCheckpoint, ...]
    typed: tuple[str, ...] = ()
    flagship: str | None = None


def _ssd(
    repo: str,
    parameters: float,
    layers: tuple[int, int] | None = None,
    heads: tuple[int, int] | None = None,
    *,
    n: int = 128,
    g: int = 1,
    chunk: int = 256,
    source: str = CARD,
    context: int | None = None,
) -> KnownCheckpoint:
    """`layers` is (with SSD, all); `heads` is (nheads, headdim)."""
    return KnownCheckpoint(
        repo=repo,
        parameters=round(parameters),
        parameters_from=source,
        operator_layers=layers[0] if layers else None,
        layers=layers[1] if layers else None,
        dims=heads and SSDLayerDims(nheads=heads[0], headdim=heads[1], dstate=n, ngroups=g, chunk_size=chunk),
        trained_context=context,
    )


def _gdn(
    repo: str, parameters: float, layers: tuple[int, int], heads: tuple[int, int], *, k: int = 128, v: int = 128
) -> KnownCheckpoint:
    """`layers` is (with GDN, all); `heads` is (key heads, value heads)."""
    return KnownCheckpoint(
        repo=repo,
        parameters=round(parameters),
        parameters_from=CARD,
        operator_layers=layers[0],
        layers=layers[1],
        dims=GDNSizes(key_heads=heads[0], value_heads=heads[1], key_dim=k, value_dim=v),
    )


FAMILIES: tuple[FamilyRow, ...] = (
    FamilyRow(
        title="Granite 4.0 H",
        model_type="granitemoehybrid",
        operator="ssd",
        typed=("ibm-granite/granite-4.0", "ibm-granite/granite-4.0-h"),
        flagship="ibm-granite/granite-4.0-h-small",
        checkpoints=(
            _ssd("ibm-granite/granite-4.0-h-350m", 0.35e9, None, (48, 32)),
            _ssd("ibm-granite/granite-4.0-h-1b", 1.46e9, (36, 40), (48, 64), source=FILE_SIZE),
            _ssd("ibm-granite/granite-4.0-h-micro", 3e9, (36, 40), (64, 64)),
            _ssd("ibm-granite/granite-4.0-h-tiny", 7e9, (36, 40), (48, 64)),
            _ssd("ibm-granite/granite-4.0-h-small", 32e9, (36, 40), (128, 64)),
        ),
    ),
    FamilyRow(
        title="Mamba-2",
        model_type="mamba2",
        operator="ssd",
        typed=("state-spaces/mamba2",),
        flagship="state-spaces/mamba2-2.7b",
        checkpoints=(
            _ssd("state-spaces/mamba2-130m", 0.13e9, (24, 24), (24, 64), context=2048),
            _ssd("state-spaces/mamba2-370m", 0.37e9, (48, 48), (32, 64), context=2048),
            _ssd("state-spaces/mamba2-780m", 0.78e9, (48, 48), (48, 64), context=2048),
            _ssd("state-spaces/mamba2-1.3b", 1.3e9, (48, 48), (64, 64), context=2048),
            _ssd("state-spaces/mamba2-2.7b", 2.7e9, (64, 64), (80, 64), context=2048, source=FILE_SIZE),
        ),
    ),
    FamilyRow(
        title="Mamba-Codestral",
        model_type="mamba2",
        operator="ssd",
        checkpoints=(_ssd("mistralai/Mamba-Codestral-7B-v0.1", 7.3e9, (64, 64), (128, 64), g=8, source=FILE_SIZE),),
    ),
    FamilyRow(
        title="Bamba",
        model_type="bamba",
        operator="ssd",
        checkpoints=(
            _ssd("ibm-ai-platform/Bamba-9B", 9e9, (29, 32), (128, 64), context=4096),
            _ssd("ibm-ai-platform/Bamba-9B-v2", 9e9, (29, 32), (128, 64), context=4096),
        ),
    ),
    FamilyRow(
        title="Nemotron-H and Nemotron 3",
        model_type="nemotron_h",
        operator="ssd",
        checkpoints=(
            _ssd("nvidia/Nemotron-H-8B-Base-8K", 8e9, (24, 52), (128, 64), g=8, chunk=128, context=8192),
            _ssd("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 9e9, (27, 56), (128, 80), g=8, chunk=128),
            _ssd("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 30e9, (23, 52), (64, 64), g=8, chunk=128),
            _ssd("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", 120e9, (40, 88), (128, 64), g=8, chunk=128),
        ),
    ),
    FamilyRow(
        title="Falcon-H1",
        model_type="falcon_h1",
        operator="ssd",
        typed=("tiiuae/Falcon-H1",),
        flagship="tiiuae/Falcon-H1-34B-Instruct",
        checkpoints=(
            _ssd("tiiuae/Falcon-H1-0.5B-Instruct", 0.5e9, (36, 36), (24, 64), chunk=128),
            _ssd("tiiuae/Falcon-H1-1.5B-Instruct", 1.5e9, (24, 24), (48, 64), n=256, chunk=128),
            _ssd("tiiuae/Falcon-H1-1.5B-Deep-Instruct", 1.5e9, (66, 66), (24, 64), n=256, chunk=128),
            _ssd("tiiuae/Falcon-H1-3B-Instruct", 3e9, (32, 32), (32, 128), n=256, chunk=128),
            _ssd("tiiuae/Falcon-H1-7B-Instruct", 7e9, (44, 44), (24, 128), n=256, chunk=128),
            _ssd("tiiuae/Falcon-H1-34B-Instruct", 34e9, (72, 72), (32, 128), n=256, g=2, chunk=128),
        ),
    ),
    FamilyRow(
        title="Zamba2",
        model_type="zamba2",
        operator="ssd",
        typed=("Zyphra/Zamba2",),
        flagship="Zyphra/Zamba2-7B",
        checkpoints=(
            _ssd("Zyphra/Zamba2-1.2B", 1.2e9, (38, 38), (64, 64), context=4096),
            _ssd("Zyphra/Zamba2-2.7B", 2.7e9, (54, 54), (80, 64), n=64, context=4096),
            _ssd("Zyphra/Zamba2-7B", 7e9, (81, 81), (112, 64), n=64, g=2, context=4096),
        ),
    ),
    FamilyRow(
        title="Qwen3-Next",
        model_type="qwen3_next",
        operator="gdn",
        typed=("Qwen/Qwen3-Next",),
        flagship="Qwen/Qwen3-Next-80B-A3B-Instruct",
        checkpoints=(
            _gdn("Qwen/Qwen3-Next-80B-A3B-Instruct", 80e9, (36, 48), (16, 32)),
            _gdn("Qwen/Qwen3-Next-80B-A3B-Thinking", 80e9, (36, 48), (16, 32)),
            _gdn("Qwen/Qwen3-Coder-Next", 80e9, (36, 48), (16, 32)),
        ),
    ),
    FamilyRow(
        title="Qwen3.5, dense",
        model_type="qwen3_5",
        operator="gdn",
        checkpoints=(
            _gdn("Qwen/Qwen3.5-0.8B", 0.8e9, (18, 24), (16, 16)),
            _gdn("Qwen/Qwen3.5-2B", 2e9, (18, 24), (16, 16)),
            _gdn("Qwen/Qwen3.5-4B", 4e9, (24, 32), (16, 32)),
            _gdn("Qwen/Qwen3.5-9B", 9e9, (24, 32), (16, 32)),
            _gdn("Qwen/Qwen3.5-27B", 27e9, (48, 64), (16, 48)),
        ),
    ),
    FamilyRow(
        title="Qwen3.5, mixture of experts",
        model_type="qwen3_5_moe",
        operator="gdn",
        checkpoints=(
            _gdn("Qwen/Qwen3.5-35B-A3B", 35e9, (30, 40), (16, 32)),
            _gdn("Qwen/Qwen3.5-122B-A10B", 122e9, (36, 48), (16, 64)),
            _gdn("Qwen/Qwen3.5-397B-A17B", 397e9, (45, 60), (16, 64)),
        ),
    ),
    FamilyRow(
        title="Olmo Hybrid",
        model_type="olmo_hybrid",
        operator="gdn",
        checkpoints=(_gdn("allenai/Olmo-Hybrid-7B", 7e9, (24, 32), (30, 30), k=96, v=192),),
    ),
)


def family_named(typed: str) -> FamilyRow | None:
    """The family with the name `typed`; None if there is none."""
    return next((row for row in FAMILIES if typed.casefold() in map(str.casefold, row.typed)), None)


def known(repo_id: str) -> KnownCheckpoint | None:
    """The table's entry for a repo."""
    return next((c for row in FAMILIES for c in row.checkpoints if c.repo.casefold() == repo_id.casefold()), None)


def siblings_that_fit(repo_id: str, budget_bytes: int) -> tuple[KnownCheckpoint, ...]:
    """Other members of `repo_id`'s family whose 16-bit weights take at most `budget_bytes`, largest first."""
    members = next((row.checkpoints for row in FAMILIES if any(c.repo == repo_id for c in row.checkpoints)), ())
    fitting = [c for c in members if c.repo != repo_id and c.weight_bytes <= budget_bytes]
    return tuple(sorted(fitting, key=lambda checkpoint: -checkpoint.parameters))
