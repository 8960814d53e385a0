"""Resolves names of implementations.

unfused, fused, ...      an implementation of ssdprof's, or an alternative form of one
mamba_ssm, fla, ...      another library, as installed
published=~/mamba        another library, in a checkout
my_kernel                an entry point of the group `ssdprof.implementations`
my_module:my_function    the user's own kernel; its module may lie in the current directory

The second half of this file loads a user's kernel: an importable function of the operator's inputs.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial, reduce
from importlib import import_module, metadata
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ssdprof import kernels, operators
from ssdprof.core.base import DType
from ssdprof.errors import BadInputError, MissingCapabilityError, library_message, nearest
from ssdprof.kernels import registry
from ssdprof.kernels.registry import Implementation
from ssdprof.operators.generate import Library
from ssdprof.operators.late import torch
from ssdprof.operators.operator import Operator
from ssdprof.operators.serving import in_pool
from ssdprof.operators.tensors import exact_fp32

if TYPE_CHECKING:
    from ssdprof.kernels.inputs import Inputs

GROUP = "ssdprof.implementations"
Kind = Literal["bundled", "library", "own"]
Resolve = Callable[[str, str], Implementation]  # (operator, word)


def required(implementation: Implementation) -> Implementation:
    """The same.  Raises MissingCapabilityError if it is unavailable."""
    if implementation.absent:
        raise MissingCapabilityError(implementation.absent, implementation.hint)
    return implementation


def own_precisions(
    implementation: Implementation, dtype: DType, wanted: tuple[kernels.Precision, ...]
) -> tuple[kernels.Precision, ...]:
    """Its precisions for inputs of this dtype: `wanted`, unless it has precisions of its own."""
    return wanted if implementation.precisions is None else implementation.precisions(dtype)


def resolver(device: torch.device) -> Resolve:
    """As `resolve`, for one device, by an operator's name: each word once, so that a library that
    tunes itself keeps its configurations; unavailable if it cannot run on this kind of device.

    A library with a checkout can be named without it later.  BadInputError for a second checkout of
    a library.
    """
    known: dict[tuple[str, str], Implementation] = {}

    def get(operator: str, word: str) -> Implementation:
        if (operator, word) not in known:
            implementation = resolve(operators.get(operator), word)
            if implementation.needs_gpu and not implementation.absent and device.type != "cuda":
                why = f"{implementation.name} needs an NVIDIA GPU, and this machine has none."
                implementation = replace(implementation, absent=why, hint="Leave it out.")
            if (operator, implementation.name) in known:
                raise _two_checkouts(implementation.name)
            known[operator, word] = known[operator, implementation.name] = implementation
        return known[operator, word]

    return get


def refuse_two_checkouts(words: Iterable[str]) -> None:
    """Raises BadInputError if two words name one library, because reports identify implementations
    by name.
    """
    names = [word.partition("=")[0] for word in dict.fromkeys(words)]
    for name in names:
        if names.count(name) > 1:
            raise _two_checkouts(name)


def _two_checkouts(name: str) -> BadInputError:
    return BadInputError(
        f"{name} is named with two checkouts.", "Measure each of them in a command of its own."
    )


def known(operator: Operator) -> tuple[str, ...]:
    """Every name that can be resolved for the operator, except module:function."""
    return tuple(
        dict.fromkeys((*kernels.names(operator.name), *operator.libraries, *entry_points()))
    )


def knows(operator: Operator, word: str) -> bool:
    """Whether `resolve` knows the name, available or not.  Any MODULE:FUNCTION is known."""
    return ":" in word or word.partition("=")[0] in known(operator)


def refuse_unknown(option: str, words: Iterable[str], *, besides: tuple[str, ...] = ()) -> None:
    """Raise BadInputError for words of an option that no operator knows, and for those in
    `besides`.

    Nothing is imported: an implementation that is known may still be missing on this machine.
    """
    names: dict[str, None] = {}
    for operator in operators.records():
        names |= dict.fromkeys(known(operator))
    for name in besides:
        names.pop(name, None)
    unknown = [
        word
        for word in words
        if word in besides or (":" not in word and word.partition("=")[0] not in names)
    ]
    if unknown:
        raise BadInputError(
            f"{option} does not know {', '.join(map(repr, unknown))}.",
            f"{nearest(unknown[0], names)}  A kernel of your own is MODULE:FUNCTION.",
        )


def kind_of(operator: Operator, word: str) -> Kind:
    """The kind of implementation of a known name, without importing anything."""
    name = word.partition("=")[0]
    if name in operator.libraries:
        return "library"
    return "bundled" if name in kernels.names(operator.name) else "own"


def resolve(operator: Operator, word: str) -> Implementation:
    """Resolve `word` among the implementations of the operator.  Bundled ones and libraries come
    first.

    An unavailable library is not an error: the result has the reason.  Raises BadInputError for an
    unknown name, a library without its checkout or with one that is not a folder, and an own kernel
    that cannot be imported or takes another operator's inputs.
    """
    return replace(_resolved(operator, word), word=word)


def _resolved(operator: Operator, word: str) -> Implementation:
    """`resolve`, without the word."""
    name, _, checkout = word.partition("=")
    libraries = operator.libraries
    if name in libraries:
        return _library(
            operator.name, name, libraries[name], Path(checkout).expanduser() if checkout else None
        )
    if checkout:
        raise BadInputError(
            f"{name!r} is not a library of {operator.name}, and only libraries are loaded from a "
            "checkout.",
            f"Libraries are: {', '.join(libraries) or 'none'}.",
        )
    if name in kernels.names(operator.name):
        return kernels.get(operator.name, name)
    if ":" in name:
        return _own(operator, name, name)
    if name in entry_points():
        return _own(operator, name, entry_point(name))
    others = [
        f": it is one of {other.name}" for other in operators.records() if name in known(other)
    ]
    where = others[0] if others else ""
    raise BadInputError(
        f"There is no implementation {name!r} of {operator.name}{where}.",
        f"{nearest(name, known(operator))}  A kernel of your own is MODULE:FUNCTION.",
    )


def _library(operator: str, name: str, source: Library, checkout: Path | None) -> Implementation:
    """A library, or why it is unavailable.  BadInputError for a checkout where there is none, or
    none where one is needed.
    """
    if source.repository and checkout is None:
        where = f"Give a checkout of {source.repository}: {name}=DIRECTORY."
        raise BadInputError(f"No package contains the {name} kernel.", where)
    if checkout is not None and not source.repository:
        raise BadInputError(
            f"{name} is taken as installed, not from {checkout}.", f"Give the name alone: {name}."
        )
    if checkout is not None and not checkout.is_dir():
        raise BadInputError(f"There is no folder {checkout}.", source.hint)
    try:
        return replace(source.load(checkout), kind="library", needs_gpu=source.needs_gpu)
    except ImportError as error:
        where = " from its checkout" if checkout else ""
        why = f"{name} cannot be imported{where}: {str(error).rstrip('.')}."
        return registry.unavailable(operator, name, absent=why, hint=source.hint)


def _own(operator: Operator, name: str, reference: str) -> Implementation:
    """The user's kernel.  BadInputError if its inputs are annotated as another operator's."""
    try:
        function = load(reference)
    except BadInputError as error:
        if name == reference:
            raise
        raise BadInputError(
            f"The entry point {name!r} cannot be loaded.  {error.message}",
            "Leave it out, or repair the package that registers it.",
        ) from error
    notes = [parameter.annotation for parameter in _parameters(function).values()]
    types = {str(getattr(note, "__name__", note)).rpartition(".")[2] for note in notes}
    for other in operators.records():
        if other.name != operator.name and other.inputs.__name__ in types:
            raise BadInputError(
                f"{name} takes {other.inputs.__name__}, and these layers are {operator.layers} "
                "layers.",
                f"Name a function that takes {operator.inputs.__name__}, or run a model with other "
                "layers.",
            )
    return replace(own_implementation(operator, name, function), version=reference)


# --- the user's own kernel


def entry_points() -> tuple[str, ...]:
    """The names that installed packages register."""
    return tuple(sorted(metadata.entry_points(group=GROUP).names))


def entry_point(name: str) -> str:
    """The module:function that a package registers under `name`.  BadInputError if several packages
    register one.
    """
    references = sorted({point.value for point in metadata.entry_points(group=GROUP, name=name)})
    if len(references) > 1:
        raise BadInputError(
            f"Several installed packages register {name!r}.",
            f"Name one of: {', '.join(references)}.",
        )
    return references[0]


def load(reference: str) -> Callable[..., Any]:
    """The function "module:function".  Raises BadInputError with the message of a failed import."""
    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        missing = "function" if name else "module"
        raise BadInputError(f"{reference!r} names no {missing}.", "Give MODULE:FUNCTION.")
    try:
        # sets interpreter mode before the user's kernels are defined
        import_module("ssdprof.kernels.device")
        # keep stdout free for the command's data
        with _current_directory_first(), redirect_stdout(sys.stderr):
            module = import_module(name)
    except KeyboardInterrupt:
        raise
    # any exit of the user's module: pytest's skip is not an Exception
    except BaseException as error:
        raise BadInputError(
            f"The module of {reference} cannot be imported: {library_message(error)}.",
            "Give MODULE:FUNCTION, where MODULE is importable, also from the current directory.",
        ) from error
    try:
        function = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        file = getattr(module, "__file__", None) or "built in"
        raise BadInputError(
            f"The module {name} ({file}) has no {attribute!r}.", "Give MODULE:FUNCTION."
        ) from None
    if not callable(function):
        raise BadInputError(
            f"{reference} is not a function, but of type {type(function).__name__}.",
            "Name a function of the operator's inputs: docs/your-own-kernel.md.",
        )
    return function


def source_files(several: Iterable[Implementation]) -> list[Path]:
    """The files of the user's kernels."""
    modules = [
        sys.modules.get(implementation.version.partition(":")[0])
        for implementation in several
        if implementation.kind == "own"
    ]
    return [Path(file) for module in modules if (file := getattr(module, "__file__", None))]


def own_implementation(
    operator: Operator, name: str, function: Callable[..., Any]
) -> Implementation:
    """The function as an implementation of the operator, at every precision if it has a parameter
    of that name.

    Its attribute `operand_precision = "tf32"` declares that it cuts the operands of matrix
    products, and `keeps_states = True` that it returns the states that `Inputs.state_every` asks
    for, and `pools = True` that it reads initial states by `Inputs.state_indices`.
    `in_place = True` declares that it writes new states to a pool, and that every call of it is
    such a call.  `batch_invariant = True`: see `Implementation`.  Raises BadInputError for another
    value.
    """
    operands = getattr(function, "operand_precision", None)
    if operands not in (None, "tf32"):
        raise BadInputError(
            f'{name} declares operand_precision {operands!r}; it can be "tf32" only.'
        )
    in_place = getattr(function, "in_place", False)
    keeps_states = getattr(function, "keeps_states", False)
    run = partial(_run_function, name, function)
    reason = "declares operands cut to tf32" if operands else ""
    plan = registry.Plan(variant=name, launches=0, reason=reason)
    implementation = registry.Implementation(
        operator=operator.name,
        name=name,
        run=run,
        plan=lambda _inputs, _precision: plan,
        cuts_operands=operands is not None,
        keeps=lambda _inputs: keeps_states,
        pools=getattr(function, "pools", False),
        in_place=run if in_place else None,
        batch_invariant=getattr(function, "batch_invariant", False),
        kind="own",
        version=name,
        precisions=None if "precision" in _parameters(function) else exact_fp32,
    )
    return in_pool(implementation) if in_place else implementation


def _run_function(
    name: str, function: Callable[..., Any], inputs: Inputs, precision: kernels.Precision
) -> kernels.Output:
    """Raises TypeError unless the function returns two tensors."""
    output = _call_function(name, function, inputs, precision)
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise TypeError(f"{name} must return (out, final_states), not {_type(output)}")
    for what, tensor in zip(("out", "final_states"), output, strict=True):
        if type(tensor) is not torch.Tensor:  # a subclass may compute when it is read
            raise TypeError(f"{name} must return tensors, and {what} is {_type(tensor)}")
    return kernels.Output(*output)


def _call_function(
    name: str, function: Callable[..., Any], inputs: Inputs, precision: kernels.Precision
) -> object:
    """On the GPU of the inputs, where Triton launches.  An exit becomes a RuntimeError."""
    index = inputs.device.index
    more = {"precision": precision} if "precision" in _parameters(function) else {}
    try:
        with torch.cuda.device(-1 if index is None else index):  # -1 is none
            return function(inputs, **more)
    except Exception:
        raise
    # SystemExit, GeneratorExit, or an interrupt, where Ctrl-C is no signal
    except BaseException as error:
        ctrl_c = (
            isinstance(error, KeyboardInterrupt)
            and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        )
        if ctrl_c or type(error).__module__.startswith("ssdprof."):
            raise
        raise RuntimeError(f"{name} raised {library_message(error)}") from None


def _parameters(function: Callable[..., Any]) -> Mapping[str, Parameter]:
    """Empty for a built-in, which has no signature."""
    try:
        return signature(function).parameters
    except ValueError:
        return {}


def _type(thing: object) -> str:
    size = f" of {len(thing)}" if isinstance(thing, tuple | list) else ""
    return f"{type(thing).__name__}{size}"


@contextmanager
def _current_directory_first() -> Iterator[None]:
    """Put the current directory first on sys.path, as for a script; afterwards last, for later
    imports.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)
