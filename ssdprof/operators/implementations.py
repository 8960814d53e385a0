"""Resolves words of the command line that name implementations:

unfused, fused, ...      an implementation of ssdprof, or an alternative form of one
mamba_ssm, fla, ...      another library, as installed
published=~/mamba        another library, from a checkout
my_kernel                an entry point of the group `ssdprof.implementations`
my_module:my_function    the user's own kernel; the module may be in the current directory

The second half of this file loads a user's kernel, which is an importable function that takes the
operator's inputs.
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
from ssdprof.core.base import DType, distinct
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
Resolve = Callable[[str, str], Implementation]  # (operator's name, word) -> the implementation


def required(implementation: Implementation) -> Implementation:
    """Returns the implementation.  Raises MissingCapabilityError if it is unavailable."""
    if implementation.absent:
        raise MissingCapabilityError(implementation.absent, implementation.hint)
    return implementation


def own_precisions(
    implementation: Implementation, dtype: DType, wanted: tuple[kernels.Precision, ...]
) -> tuple[kernels.Precision, ...]:
    """The precisions to run the implementation at, for inputs of this dtype: `wanted`, unless the
    implementation has precisions of its own.
    """
    return wanted if implementation.precisions is None else implementation.precisions(dtype)


def resolver(device: torch.device) -> Resolve:
    """A form of `resolve` for one device that takes the operator's name.

    It resolves each word once, so that a library that tunes itself keeps its configurations.  An
    implementation that needs a GPU is unavailable on a CPU.  After a word with a checkout, the
    library's name alone stands for the same.  The returned function raises what `resolve` raises,
    and BadInputError for a second checkout of a library.
    """
    resolved: dict[tuple[str, str], Implementation] = {}

    def get(operator: str, word: str) -> Implementation:
        if (operator, word) not in resolved:
            implementation = resolve(operators.get(operator), word)
            if implementation.needs_gpu and not implementation.absent and device.type != "cuda":
                absent = f"{implementation.name} needs an NVIDIA GPU, and this machine has none."
                implementation = replace(implementation, absent=absent, hint="Leave it out.")
            if (operator, implementation.name) in resolved:
                raise _two_checkouts(implementation.name)
            resolved[operator, word] = implementation
            resolved[operator, implementation.name] = implementation
        return resolved[operator, word]

    return get


def refuse_two_checkouts(words: Iterable[str]) -> None:
    """Raises BadInputError if two different words have the same name, such as "published=a" and
    "published=b", because reports identify implementations by name.
    """
    names = [word.partition("=")[0] for word in dict.fromkeys(words)]
    for name in names:
        if names.count(name) > 1:
            raise _two_checkouts(name)


def _two_checkouts(name: str) -> BadInputError:
    """The error for a library that is named with two checkouts."""
    return BadInputError(
        f"{name} is named with two checkouts.", "Measure each of them in a command of its own."
    )


def known(operator: Operator) -> tuple[str, ...]:
    """Every name that `resolve` knows for the operator, except the user's MODULE:FUNCTION, which
    may be any.
    """
    return tuple(
        dict.fromkeys((*kernels.names(operator.name), *operator.libraries, *entry_points()))
    )


def knows(operator: Operator, word: str) -> bool:
    """Whether `resolve` knows the word, even if the implementation is unavailable.  Any
    MODULE:FUNCTION is known.
    """
    return ":" in word or word.partition("=")[0] in known(operator)


def refuse_unknown(option: str, words: Iterable[str], *, besides: tuple[str, ...] = ()) -> None:
    """Raise BadInputError for words of an option that no operator knows, and for those that name an
    implementation in `besides`, which the option does not take.

    No implementation is imported: one that is known may still be missing on this machine.
    """
    names = [name for name in distinct(map(known, operators.records())) if name not in besides]
    unknown = [word for word in words if ":" not in word and word.partition("=")[0] not in names]
    if unknown:
        raise BadInputError(
            f"{option} does not know {', '.join(map(repr, unknown))}.",
            f"{nearest(unknown[0], names)}  A kernel of your own is MODULE:FUNCTION.",
        )


def kind_of(operator: Operator, word: str) -> Kind:
    """The kind of the implementation that a known word names, without importing it."""
    name = word.partition("=")[0]
    if name in operator.libraries:
        return "library"
    return "bundled" if name in kernels.names(operator.name) else "own"


def resolve(operator: Operator, word: str) -> Implementation:
    """The operator's implementation that `word` names.  Libraries and bundled implementations take
    precedence over entry points of the same name.

    An unavailable library is not an error: the result has the reason.  Raises BadInputError for an
    unknown name; for a checkout that is missing, superfluous or no folder; for an entry point that
    several packages register differently; and for a user's kernel that cannot be imported, takes
    another operator's inputs or declares an unknown `operand_precision`.
    """
    return replace(_resolved(operator, word), word=word)


def _resolved(operator: Operator, word: str) -> Implementation:
    """The result of `resolve` before its field `word` is set."""
    name, _, checkout = word.partition("=")
    libraries = operator.libraries
    if name in libraries:
        folder = Path(checkout).expanduser() if checkout else None
        return _library(operator.name, name, libraries[name], folder)
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
    remark = ""
    for other in operators.records():
        if name in known(other):
            remark = f": it is one of {other.name}"
            break
    raise BadInputError(
        f"There is no implementation {name!r} of {operator.name}{remark}.",
        f"{nearest(name, known(operator))}  A kernel of your own is MODULE:FUNCTION.",
    )


def _library(operator: str, name: str, source: Library, checkout: Path | None) -> Implementation:
    """A library's implementation; if it cannot be imported, an unavailable one with the reason.

    Raises BadInputError for a missing or superfluous checkout, and for one that is no folder.
    """
    if source.repository and checkout is None:
        raise BadInputError(
            f"No package contains the {name} kernel.",
            f"Give a checkout of {source.repository}: {name}=DIRECTORY.",
        )
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
        absent = f"{name} cannot be imported{where}: {str(error).rstrip('.')}."
        return registry.unavailable(operator, name, absent=absent, hint=source.hint)


def _own(operator: Operator, name: str, reference: str) -> Implementation:
    """The user's kernel as an implementation of this name.

    reference: "module:function".  It is the name, unless an entry point has another name.

    Raises BadInputError if the function cannot be imported, or if a parameter of it is annotated
    with the type of another operator's inputs alone; and the errors of `own_implementation`.
    """
    try:
        function = load(reference)
    except BadInputError as error:
        if name == reference:
            raise
        raise BadInputError(
            f"The entry point {name!r} cannot be loaded.  {error.message}",
            "Leave it out, or repair the package that registers it.",
        ) from error
    annotated = set()  # names of types, without their modules
    for parameter in _parameters(function).values():
        annotation = parameter.annotation  # a type, or text
        annotated.add(str(getattr(annotation, "__name__", annotation)).rpartition(".")[2])
    for other in operators.records():
        if other.name != operator.name and other.inputs.__name__ in annotated:
            raise BadInputError(
                f"{name} takes {other.inputs.__name__}, and these layers are {operator.layers} "
                "layers.",
                f"Name a function that takes {operator.inputs.__name__}, or run a model with other "
                "layers.",
            )
    return replace(own_implementation(operator, name, function), version=reference)


# --- the user's own kernel


def entry_points() -> tuple[str, ...]:
    """The names that installed packages register in `GROUP`."""
    return tuple(sorted(metadata.entry_points(group=GROUP).names))


def entry_point(name: str) -> str:
    """The "module:function" that an installed package registers under `name`.  Raises BadInputError
    if several packages register different ones.
    """
    references = sorted({point.value for point in metadata.entry_points(group=GROUP, name=name)})
    if len(references) > 1:
        raise BadInputError(
            f"Several installed packages register {name!r}.",
            f"Name one of: {', '.join(references)}.",
        )
    return references[0]


def load(reference: str) -> Callable[..., Any]:
    """Import a user's "module:function" and return the function.

    The module may be in the current directory, and what it prints while it is imported goes to
    stderr.  Raises BadInputError if there is no such function, with the message of a failed import.
    """
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
    except BaseException as error:  # of any class: pytest's skip is not an Exception
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


def source_files(implementations: Iterable[Implementation]) -> list[Path]:
    """The files of the modules of those implementations that are the user's kernels, as far as
    these modules are imported from files.
    """
    files = []
    for implementation in implementations:
        if implementation.kind == "own":
            module = sys.modules.get(implementation.version.partition(":")[0])
            file = getattr(module, "__file__", None)
            if file:
                files.append(Path(file))
    return files


def own_implementation(
    operator: Operator, name: str, function: Callable[..., Any]
) -> Implementation:
    """The user's function as an implementation of the operator.  It runs at every precision if it
    has a parameter `precision`, otherwise with exact intermediates and fp32 states.

    Attributes of the function declare what it does:

    operand_precision = "tf32"    it cuts the operands of matrix products to tf32
    keeps_states = True           it returns the states that `Inputs.state_every` asks for
    pools = True                  it reads initial states by `Inputs.state_indices`
    in_place = True               it writes new states to a pool, in every call, and returns it;
                                  `in_pool` then keeps states after each token, and reads pools
    batch_invariant = True        see `Implementation`

    Raises BadInputError for another `operand_precision`.
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
    """The output of the user's function.  Raises TypeError if that is not a pair of tensors, and
    what `_call_function` raises.
    """
    output = _call_function(name, function, inputs, precision)
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise TypeError(f"{name} must return (out, final_states), not {_type(output)}")
    for result, tensor in zip(("out", "final_states"), output, strict=True):
        if type(tensor) is not torch.Tensor:  # a subclass may compute when it is read
            raise TypeError(f"{name} must return tensors, and {result} is {_type(tensor)}")
    return kernels.Output(*output)


def _call_function(
    name: str, function: Callable[..., Any], inputs: Inputs, precision: kernels.Precision
) -> object:
    """Call the user's function with the inputs' GPU as the current device, because Triton launches
    there.

    Raises RuntimeError in place of what is no Exception, such as SystemExit, because that would end
    ssdprof.  Exceptions, a Ctrl-C of the user, and what ssdprof itself raises pass as they are.
    """
    index = inputs.device.index
    options = {"precision": precision} if "precision" in _parameters(function) else {}
    try:
        with torch.cuda.device(-1 if index is None else index):  # no effect for -1
            return function(inputs, **options)
    except Exception:
        raise
    except BaseException as error:
        # while SIGINT is ignored, no Ctrl-C arrives: then the function itself raised the error
        ctrl_c = (
            isinstance(error, KeyboardInterrupt)
            and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        )
        if ctrl_c or type(error).__module__.startswith("ssdprof."):
            raise
        raise RuntimeError(f"{name} raised {library_message(error)}") from None


def _parameters(function: Callable[..., Any]) -> Mapping[str, Parameter]:
    """Parameters by name; none for a function without a signature, as some built-in ones are."""
    try:
        return signature(function).parameters
    except ValueError:
        return {}


def _type(value: object) -> str:
    """The name of the value's type; for a tuple or a list with its length: "tuple of 3"."""
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{type(value).__name__}{size}"


@contextmanager
def _current_directory_first() -> Iterator[None]:
    """Put the current directory first on sys.path, as Python does for a script.  Afterwards it is
    where it was before, or else last, so that later imports of the user's kernel still find its
    modules.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)
