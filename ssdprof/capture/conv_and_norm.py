"""Computes the convolution before a mixer's operator, and the gated norm after it, with the bundled
kernels.

Without the package causal_conv1d, transformers uses torch's depthwise convolution, which transposes
the layout.  Its gated norms are half a dozen elementwise kernels in fp32.  Both are replaced where
the mixer calls them.  The convolution, like the operator, is a global of the modeling file; the
norm is the forward of a module.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ssdprof.capture.intercept import forward_replaced, namespaces, replaced
from ssdprof.checkpoint.mixers import Mixer
from ssdprof.core.words import plural
from ssdprof.kernels.mixer import causal_conv1d, gated_rms_norm
from ssdprof.kernels.registry import UnsupportedError

CONVOLUTION = "causal_conv1d_fn"  # the global of a modeling file that a mixer calls for a prompt
_SILU = ("silu", "swish")
_PACKED = ("seq_idx", "cu_seqlens", "cu_seq_lens_q")  # arguments for packed sequences
_PROBE_ROWS = 3
# relative distance by RMS up to which a model's norm is taken for the bundled one; bf16 rounds to
# 2^-9
_TOLERANCE = 2**-5


def gated_norms(mixer: Mixer) -> list[nn.Module]:
    """The mixer's child modules whose forward takes a gate."""
    return [
        module
        for module in mixer.module.children()
        if "gate" in inspect.signature(module.forward).parameters
    ]


def norm_form(module: nn.Module) -> dict[str, Any] | None:
    """Options with which `gated_rms_norm` computes what `module` computes, tested on random rows;
    None if there are none, or if the module has no vector `weight`, or no `variance_epsilon`.

    Raises the errors of `gated_rms_norm`.
    """
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or eps is None:
        return None
    width = len(weight)
    probe = torch.randn(2, _PROBE_ROWS, width, generator=torch.Generator().manual_seed(0))
    x, gate = probe.to(weight.device, weight.dtype)
    # models keep the size of a group, their number, or nothing if the whole width is one group
    group_sizes = (
        getattr(module, "group_size", width),
        width // getattr(module, "n_groups", 1),
        width,
    )
    with torch.no_grad():
        expected = module(x, gate).float()
        for group_size in dict.fromkeys(group_sizes):
            for norm_first in (False, True):
                form = {"group_size": group_size, "norm_first": norm_first, "eps": eps}
                bundled = gated_rms_norm(x, gate, weight, **form).float()
                if float((bundled - expected).norm()) <= _TOLERANCE * float(expected.norm()):
                    return form
    return None


class ConvAndNorm:
    """Replaces a model's convolutions and gated norms by the bundled kernels, while `installed`.

    left_to_model: the parts that are not replaced, or not in all layers, in words; empty if there
        are none.
    """

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        self._namespaces = namespaces(mixers)
        modules = chain.from_iterable(map(gated_norms, mixers))
        forms = [(module, norm_form(module)) for module in modules]
        self._norms = [(module, form) for module, form in forms if form is not None]
        unknown_norms = len(forms) - len(self._norms)
        parts = []
        if any(CONVOLUTION not in namespace for namespace in self._namespaces):
            parts.append("the convolution")
        if unknown_norms:
            norms = plural(unknown_norms, "gated norm")
            parts.append(f"{norms} of a form that the kernel does not have")
        self.left_to_model = tuple(parts)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the kernels.  The model is restored when the context closes.

        While it is open, the model's forward raises UnsupportedError for a convolution that the
        kernel does not support.
        """
        with ExitStack() as restore:
            for namespace in self._namespaces:
                if CONVOLUTION in namespace:
                    restore.enter_context(replaced(namespace, CONVOLUTION, _convolve))
            for module, form in self._norms:
                norm = partial(_norm, module, form)
                restore.enter_context(forward_replaced(module, norm))
            yield


def _convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: object,
) -> Tensor:
    """Replaces the convolution of transformers, which takes the same arguments: (b, d, l) ->
    (b, d, l).  In memory the result is (b, l, d), as the operator's kernels read it.

    Raises UnsupportedError for another activation than silu, and for packed sequences.  All other
    arguments are those of a model's forward, and are ignored.
    """
    if activation not in (None, *_SILU):
        raise UnsupportedError(f"the bundled convolution has no {activation}, only silu")
    for name in _PACKED:
        if others.get(name) is not None:
            raise UnsupportedError(f"the bundled convolution does not take {name}")
    out, _ = causal_conv1d(hidden_states.transpose(1, 2), weight, bias, silu=activation is not None)
    return out.transpose(1, 2)


def _norm(module: Any, form: dict[str, Any], hidden_states: Tensor, gate: Tensor) -> Tensor:
    """Replaces the forward of a gated norm of transformers.  form: from `norm_form`."""
    return gated_rms_norm(hidden_states, gate, module.weight, **form)
