"""The table of places, from `places.toml`.  Imports no torch."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import get_args

from ssdprof.record import delta_rule, selective_scan
from ssdprof.record.place import FunctionCall, Phase, Place
from ssdprof.record.signature import Arguments, Signature, arguments_of, signatures

# (whether the function is for a step, arguments by our names) -> the call
_BIND: dict[str, Callable[[bool, Arguments], FunctionCall | None]] = {
    "gdn": partial(delta_rule.bind, False),
    "kda": partial(delta_rule.bind, True),
    "ssd": selective_scan.bind,
}
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_REFUSED = tuple(_TABLE["refused"].split())


def _bind(
    signature: Signature, operator: str, phase: Phase, arguments: Arguments
) -> FunctionCall | None:
    """As `Place.bind`."""
    for name in _REFUSED:
        if arguments.get(name) is not None and arguments[name] is not False:
            raise ValueError(f"a call with {name} is not recorded")
    call = _BIND[operator](phase != "prompt", arguments_of(signature, arguments))
    layer = arguments.get("layer_id")
    if call is not None and layer is not None:
        call.layer = str(layer)
    return call


def _places() -> Iterator[Place]:
    known = signatures(_TABLE["signature"])
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


PLACES: tuple[Place, ...] = tuple(_places())
