"""The table of places, from `places.toml`: which functions, and how each takes the operator's
inputs, its signature.  Imports no torch.

A signature gives a function's parameters our names.  These are the fields of the operators' inputs;
those of `states.CallStates`; and

norm            q and k are normalised inside
mixed           (B, 2 H K + HV V) in place of q, k and v: side by side, one token of each sequence
g, beta         in any shape with as many numbers
raw_gate        g is -exp(A_log) softplus(g + dt_bias); without this name, if there is an A_log
lower_bound     KDA's g is lower_bound sigmoid(exp(A_log) (g + dt_bias)) instead; where there is
                `bounded`, only if that is True or "bounded"
softplus        a factor inside of softplus
domain          "linear": g is the decay, not its logarithm
raw_beta        beta is sigmoid(beta), doubled with `doubled`
is_kda          which of the two operators that the function serves is called
out             where the function writes its output, if it does not return it
pool            FlashInfer's in place of `state`.  second: a second pool
overwrites      our names of inputs that the function writes over, besides initial states
new_states      it writes final states to other memory than that of the initial ones
chunks, last    vLLM returns the states of all chunks; the last chunk of each sequence
kept, kept_packed, tracked
                Mamba-2: the function returns final states; of packed sequences; before others
"""

import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias, get_args

from ssdprof.record import delta_rule, selective_scan
from ssdprof.record.place import Arguments, FunctionCall, Phase, Place

# (whether the function is for a step, arguments by our names) -> the call
_BIND: dict[str, Callable[[bool, Arguments], FunctionCall | None]] = {
    "gdn": partial(delta_rule.bind, False),
    "kda": partial(delta_rule.bind, True),
    "ssd": selective_scan.bind,
}
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_REFUSED = tuple(_TABLE["refused"].split())

# "reads", "may", "owner": our name -> the parameter, the parameter of some versions, the attribute
# of `self`; "fixed": our name -> what is no argument
Signature: TypeAlias = dict[str, dict[str, str]]
_NAMES = ("reads", "may", "owner")


def _signatures() -> dict[str, Signature]:
    """All signatures of `places.toml`, by name.  One may be like others that precede it there."""
    known: dict[str, Signature] = {}
    for name, entry in _TABLE["signature"].items():
        signature: Signature = {kind: {} for kind in (*_NAMES, "fixed")}
        known[name] = signature
        for like in entry.get("like", "").split():
            for kind, values in known[like].items():
                signature[kind] |= values
        for kind in _NAMES:
            signature[kind] |= _pairs(entry.get(kind, ""))
        signature["fixed"] |= entry.get("fixed", {})
    return known


def _pairs(words: str) -> Iterator[tuple[str, str]]:
    """ "q g=raw_g" -> ("q", "q"), ("g", "raw_g")."""
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
                for function, name in entry.get(phase, {}).items():
                    yield Place(
                        library=entry["library"],
                        module=module,
                        function=function,
                        operator=entry["operator"],
                        phase=phase,
                        parameters=tuple(known[name]["reads"].values()),
                        bind=partial(_bind, known[name], entry["operator"], phase),
                    )


def _bind(
    signature: Signature, operator: str, phase: Phase, by_parameter: Arguments
) -> FunctionCall | None:
    """`Place.bind` of a function with this signature."""
    for name in _REFUSED:
        if by_parameter.get(name) is not None and by_parameter[name] is not False:
            raise ValueError(f"a call with {name} is not recorded")
    call = _BIND[operator](phase != "prompt", _by_our_names(signature, by_parameter))
    layer = by_parameter.get("layer_id")
    if call is None:
        return None
    overwrites = signature["fixed"].get("overwrites", "").split()
    if "new_states" not in signature["fixed"]:
        overwrites += ["initial_state", "initial_states"]
    call.overwrites = frozenset(overwrites)
    if layer is not None:
        call.layer = str(layer)
    return call


def _by_our_names(signature: Signature, by_parameter: Arguments) -> Arguments:
    """The arguments of a call.  ValueError if `self` lacks an attribute."""
    arguments = dict(signature["fixed"])
    for our_name, parameter in {**signature["may"], **signature["reads"]}.items():
        if parameter in by_parameter:
            arguments[our_name] = by_parameter[parameter]
    for our_name, attribute in signature["owner"].items():
        if not hasattr(by_parameter["self"], attribute):
            raise ValueError(f"a layer without {attribute} is not recorded")
        arguments[our_name] = getattr(by_parameter["self"], attribute)
    return arguments


PLACES: tuple[Place, ...] = tuple(_places())
