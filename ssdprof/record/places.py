"""The table of places, from `places.toml`: the functions that compute an operator, each with its
signature.  Imports no torch.

A signature says how a function takes the operator's inputs: it maps our names to the function's
parameters.  Our names are the fields of the operators' inputs, the fields of `states.CallStates`,
and these:

norm            whether the function normalises q and k
mixed           (B, 2 H K + HV V), q, k and v side by side for one token of each sequence
g, beta         the gates, in any shape with as many numbers as the operator's g and beta have
raw_gate        whether the operator's g is -exp(A_log) softplus(g + dt_bias); without this name: if
                there is an A_log
lower_bound     if it is a number, the operator's g for a raw gate of KDA is
                lower_bound sigmoid(exp(A_log) (g + dt_bias))
bounded         if there is this name, a raw gate of KDA is bounded only where it is True or
                "bounded"
softplus        factor inside softplus; only 1 is recorded
domain          "linear": the operator's g is the logarithm of g
raw_beta        whether the operator's beta is sigmoid(beta)
doubled         whether the operator's beta is 2 sigmoid(beta) for a raw beta
is_kda          whether the call is one of KDA, for a function that serves GDN and KDA
out             where the function writes its output; None: it returns the output
other_pool      a pool that replaces `state` if the call has it
second_pool     a pool besides `state`; a call with it is not recorded
overwrites      our names of inputs that the function overwrites, besides initial states
new_states      the function writes final states to other memory than that of the initial states

For prompts of Mamba-2, where the final states are:

final_pool, final_slots
                in a pool, in these slots
last_chunks     (sequences), the index of the sequence's last chunk among the states of all chunks,
                which vLLM returns with `returns_chunks`
returns_final, returns_final_packed
                whether the function returns them, without and with cu_seqlens
returns_tracked whether other states follow them in what the function returns
"""

import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, get_args

from ssdprof.record import delta_rule, selective_scan
from ssdprof.record.place import INITIAL_STATES, Arguments, FunctionCall, Phase, Place

# operator -> (whether the function is for a few tokens of each sequence, arguments by our names)
# -> the call
_BIND: dict[str, Callable[[bool, Arguments], FunctionCall | None]] = {
    "gdn": partial(delta_rule.bind, False),
    "kda": partial(delta_rule.bind, True),
    "ssd": selective_scan.bind,
}
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_REFUSED = tuple(_TABLE["refused"].split())

# "reads": our name -> the parameter; "may": our name -> a parameter that only some versions have;
# "owner": our name -> the attribute of `self`; "fixed": our name -> a value that is no argument
Signature: TypeAlias = dict[str, dict[str, Any]]
_NAMED = ("reads", "may", "owner")  # the kinds of entries that are lists of names in the file


def _signatures() -> dict[str, Signature]:
    """All signatures of `places.toml`, by name.  A signature includes those in its `like`, which
    precede it in the file.  Its own entries replace theirs.
    """
    known: dict[str, Signature] = {}
    for name, entry in _TABLE["signature"].items():
        signature: Signature = {kind: {} for kind in (*_NAMED, "fixed")}
        known[name] = signature
        for like in entry.get("like", "").split():
            for kind, values in known[like].items():
                signature[kind] |= values
        for kind in _NAMED:
            signature[kind] |= _pairs(entry.get(kind, ""))
        signature["fixed"] |= entry.get("fixed", {})
    return known


def _pairs(words: str) -> Iterator[tuple[str, str]]:
    """Our names and the parameters or attributes: "q g=raw_g" -> ("q", "q"), ("g", "raw_g")."""
    for word in words.split():
        our_name, _, parameter = word.partition("=")
        yield our_name, parameter or our_name


def _places() -> Iterator[Place]:
    """The functions that `places.toml` lists, each in each of its modules."""
    known = _signatures()
    for entry in _TABLE["place"]:
        modules = entry.get("modules") or [
            f"transformers.models.{model}.modeling_{model}" for model in entry["models"].split()
        ]
        for module in modules:
            for phase in get_args(Phase):
                for function, signature in entry.get(phase, {}).items():
                    yield Place(
                        library=entry["library"],
                        module=module,
                        function=function,
                        operator=entry["operator"],
                        phase=phase,
                        parameters=tuple(known[signature]["reads"].values()),
                        bind=partial(_bind, known[signature], entry["operator"], phase),
                    )


def _bind(
    signature: Signature, operator: str, phase: Phase, by_parameter: Arguments
) -> FunctionCall | None:
    """`Place.bind` of a function with this signature.

    by_parameter: the arguments of a call.
    """
    for name in _REFUSED:
        if by_parameter.get(name) is not None and by_parameter[name] is not False:
            raise ValueError(f"a call with {name} is not recorded")
    call = _BIND[operator](phase != "prompt", _by_our_names(signature, by_parameter))
    if call is None:
        return None
    call.overwrites = frozenset(signature["fixed"].get("overwrites", "").split())
    if "new_states" not in signature["fixed"]:
        call.overwrites |= INITIAL_STATES
    return call


def _by_our_names(signature: Signature, by_parameter: Arguments) -> Arguments:
    """The arguments of a call by our names, in place of fixed values of these names.

    Raises ValueError if `self` lacks an attribute.
    """
    arguments = dict(signature["fixed"])
    for our_name, parameter in (signature["reads"] | signature["may"]).items():
        if parameter in by_parameter:
            arguments[our_name] = by_parameter[parameter]
    for our_name, attribute in signature["owner"].items():
        if not hasattr(by_parameter["self"], attribute):
            raise ValueError(f"a layer without {attribute} is not recorded")
        arguments[our_name] = getattr(by_parameter["self"], attribute)
    return arguments


PLACES: tuple[Place, ...] = tuple(_places())
