"""Resolves names of implementations.

unfused, fused, ...      an implementation of ssdprof's, or an alternative form of one
mamba_ssm, fla, ...      another library, as installed
published=~/mamba        another library, in a checkout
my_kernel                an entry point of the group `ssdprof.implementations`
my_module:my_function    the user's own kernel; its module may lie in the current directory
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ssdprof import kernels, operators
from ssdprof.errors import BadInputError, MissingCapabilityError, nearest
from ssdprof.kernels.registry import Implementation
from ssdprof.operators import own
from ssdprof.operators.drawing import InputDType, PeerSource
from ssdprof.operators.dtypes import input_dtype
from ssdprof.operators.operator import Operator
from ssdprof.schema import EXACT_FP32, DType, PrecisionRecord

Kind = Literal["bundled", "library", "own"]


@dataclass(frozen=True, kw_only=True)
class Named:
    """A resolved name.

    kind: "bundled" with ssdprof; of another "library"; the user's "own".
    implementation: None if it is unavailable; then `absent` is the reason, in a sentence, and `hint` the remedy.
    source: the version of a library; module:function of a user's own kernel.
    needs_gpu: whether it runs on an NVIDIA GPU only.
    fixed: (dtype of the inputs) -> its own precisions; None: it runs at any precision.
    """

    name: str
    kind: Kind
    implementation: Implementation | None = None
    absent: str = ""
    hint: str = ""
    source: str = ""
    needs_gpu: bool = False
    fixed: Callable[[InputDType], tuple[PrecisionRecord, ...]] | None = None

    @property
    def present(self) -> Implementation:
        """The implementation.  Raises MissingCapabilityError if it is unavailable."""
        if self.implementation is None:
            raise MissingCapabilityError(self.absent, self.hint)
        return self.implementation

    def on(self, device: torch.device) -> Named:
        """The same, unavailable if it cannot run on this kind of device."""
        if not self.needs_gpu or device.type == "cuda":
            return self
        why = f"{self.name} needs an NVIDIA GPU, and this machine has none."
        return replace(self, implementation=None, absent=why, hint="Leave it out.")

    def precisions(self, dtype: DType, wanted: tuple[PrecisionRecord, ...]) -> tuple[PrecisionRecord, ...]:
        """Its precisions for inputs of this dtype: `wanted`, unless it has precisions of its own."""
        return wanted if self.fixed is None else self.fixed(input_dtype(dtype))


class Roster:
    """Resolves names for one device, each once, so that a library that tunes itself keeps its configurations."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[str, str], Named] = {}

    def get(self, operator: Operator[Any], word: str) -> Named:
        """As `resolve`.  A library with a checkout can be named without it later.

        BadInputError for a second checkout of a library.
        """
        key = (operator.name, word)
        if key not in self._known:
            found = resolve(operator, word).on(self._device)
            if (operator.name, found.name) in self._known:
                raise _two_checkouts(found.name)
            self._known[key] = self._known[operator.name, found.name] = found
        return self._known[key]


def refuse_two_checkouts(words: Iterable[str]) -> None:
    """Raises BadInputError if two words name one library, because reports identify implementations by name."""
    names = [word.partition("=")[0] for word in dict.fromkeys(words)]
    for name in names:
        if names.count(name) > 1:
            raise _two_checkouts(name)


def _two_checkouts(name: str) -> BadInputError:
    return BadInputError(f"{name} is named with two checkouts.", "Measure each of them in a command of its own.")


def known(operator: Operator[Any]) -> tuple[str, ...]:
    """Every name that can be resolved for the operator, except module:function."""
    drawing = operator.bench
    others = (*drawing.alternatives, *drawing.peers) if drawing else ()
    return tuple(dict.fromkeys((*kernels.names(operator.name), *others, *own.entry_points())))


def knows(operator: Operator[Any], word: str) -> bool:
    """Whether `resolve` knows the name, available or not.  Any MODULE:FUNCTION is known."""
    return ":" in word or word.partition("=")[0] in known(operator)


def refuse_unknown(option: str, words: Iterable[str], *, besides: tuple[str, ...] = ()) -> None:
    """Raise BadInputError for words of an option that no operator knows, and for those in `besides`.

    Nothing is imported: an implementation that is known may still be missing on this machine.
    """
    records = [operators.get(name) for name in operators.names()]
    unknown = [word for word in words if word in besides or not any(knows(one, word) for one in records)]
    if unknown:
        names = dict.fromkeys(name for one in records for name in known(one) if name not in besides)
        raise BadInputError(
            f"{option} does not know {', '.join(map(repr, unknown))}.",
            f"{nearest(unknown[0], names)}  A kernel of your own is MODULE:FUNCTION.",
        )


def kind_of(operator: Operator[Any], word: str) -> Kind:
    """The kind of implementation of a known name, without importing anything."""
    name, drawing = word.partition("=")[0], operator.bench
    if drawing and name in drawing.peers:
        return "library"
    bundled = name in kernels.names(operator.name) or (drawing is not None and name in drawing.alternatives)
    return "bundled" if bundled else "own"


def resolve(operator: Operator[Any], word: str) -> Named:
    """Resolve `word` among the implementations of the operator.  Bundled ones and libraries come first.

    An unavailable library is not an error: the result has the reason.  Raises BadInputError for an unknown name, a
    library without its checkout or with one that is not a folder, and an own kernel that cannot be imported or takes
    another operator's inputs.
    """
    name, _, checkout = word.partition("=")
    drawing = operator.bench
    if drawing and name in drawing.peers:
        return _library(name, drawing.peers[name], Path(checkout).expanduser() if checkout else None)
    if checkout:
        raise BadInputError(
            f"{name!r} is not a library of {operator.name}, and only libraries are loaded from a checkout.",
            f"Libraries are: {', '.join(drawing.peers) if drawing else 'none'}.",
        )
    if name in kernels.names(operator.name):
        return Named(name=name, kind="bundled", implementation=kernels.get(operator.name, name))
    if drawing and name in drawing.alternatives:
        return Named(name=name, kind="bundled", implementation=drawing.alternatives[name])
    if ":" in name:
        return _own(operator, name, name)
    if name in own.entry_points():
        return _own(operator, name, own.entry_point(name))
    others = [one for one in operators.names() if name in known(operators.get(one))]
    raise BadInputError(
        f"There is no implementation {name!r} of {operator.name}{f': it is one of {others[0]}' if others else ''}.",
        f"{nearest(name, known(operator))}  A kernel of your own is MODULE:FUNCTION.",
    )


def _library(name: str, source: PeerSource, checkout: Path | None) -> Named:
    if source.from_checkout and checkout is None:
        raise BadInputError(
            f"No package contains the {name} kernel.", f"Give a checkout of {source.where}: {name}=DIRECTORY."
        )
    if checkout is not None and not source.from_checkout:
        raise BadInputError(f"{name} is taken as installed, not from {checkout}.", f"Give the name alone: {name}.")
    if checkout is not None and not checkout.is_dir():
        raise BadInputError(f"There is no folder {checkout}.", f"Give a checkout of {source.where}.")
    try:
        peer = source.load(checkout)
    except ImportError as error:
        where = " from its checkout" if checkout else ""
        why = f"{name} cannot be imported{where}: {str(error).rstrip('.')}."
        return Named(name=name, kind="library", absent=why, hint=source.hint)
    return Named(
        name=name,
        kind="library",
        implementation=peer.implementation,
        source=peer.version,
        needs_gpu=source.needs_gpu,
        fixed=peer.precisions,
    )


def _own(operator: Operator[Any], name: str, reference: str) -> Named:
    try:
        function = own.load(reference)
    except BadInputError as error:
        if name == reference:
            raise
        raise BadInputError(
            f"The entry point {name!r} cannot be loaded.  {error.message}",
            "Leave it out, or repair the package that registers it.",
        ) from error
    own.refuse_other_operator(operator, name, function)
    return Named(
        name=name,
        kind="own",
        implementation=own.implementation(operator, name, function),
        source=reference,
        fixed=None if own.takes_precision(function) else lambda _dtype: (EXACT_FP32,),
    )
