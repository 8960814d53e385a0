"""How a function takes an operator's inputs: a signature of `places.toml`.  Imports no torch.

Our names are the fields of the operators' inputs; those of `states.CallStates`; and

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
overwrites_v    it uses v's memory, unless `room` is given
pool            FlashInfer's in place of `state`.  second: a second pool
chunks, last    vLLM returns the states of all chunks; the last chunk of each sequence
kept, kept_packed, tracked
                Mamba-2: the function returns final states; of packed sequences; before others
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

# of a call of another library's function, by name: of any type until `bind` has looked at them
Arguments: TypeAlias = Mapping[str, Any]

# "reads", "may", "owner": our name -> the parameter, the parameter of some versions, the attribute
# of `self`; "fixed": our name -> what is no argument
Signature: TypeAlias = dict[str, dict[str, str]]
_NAMES = ("reads", "may", "owner")


def signatures(table: Mapping[str, Arguments]) -> dict[str, Signature]:
    """All signatures of `places.toml`, in whose order each is like earlier ones."""
    known: dict[str, Signature] = {}
    for name, entry in table.items():
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
        ours, _, parameter = word.partition("=")
        yield ours, parameter or ours


def arguments_of(signature: Signature, by_parameter: Arguments) -> Arguments:
    """The arguments of a call by our names.  ValueError if `self` lacks an attribute."""
    named = {**signature["may"], **signature["reads"]}.items()
    given = {ours: by_parameter[name] for ours, name in named if name in by_parameter}
    for ours, name in signature["owner"].items():
        if not hasattr(by_parameter["self"], name):
            raise ValueError(f"a layer without {name} is not recorded")
        given[ours] = getattr(by_parameter["self"], name)
    return {**signature["fixed"], **given}
