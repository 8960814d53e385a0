"""The ways of a captured call and of a model's name through the package.

    python tests/ways.py [--limits]

prints every stop; with --limits the exit code is 1 if a way is longer than its limit.
`tests/test_house.py` holds the numbers in CI.

Two numbers are counted with `sys.setprofile` on a run of the SSD demo in Triton's interpreter.  The
rule of both:

- A value is *followed* by its identity.  What is made of it is followed too: an object of a class
  of ours that a function returns, or whose `__init__` or method was given a followed value, and the
  objects of ours that it holds.  A report that is read from its files is made of the cases that
  were written to them.
- A *stop* is a function of ours (its file is under ssdprof/) that is called from another file of
  ours with an argument that is followed, or that directly holds a followed value as an attribute or
  as an element.  The receiver of a method is no argument.  A function counts once, however often it
  is called.

"name to kernel": the stops of the model's name, as the command line received it, until the first
launch of a kernel.  "call to row": the stops of the first captured call until it enters
ssdprof/report/, where it becomes a row, without the rooms that compute (kernels, operators) and
without dead ends: a stop that neither returns an object of ours, nor is a method, which can keep
the value, nor calls another stop.  The call is the first object with real tensors that a function
of ssdprof/capture/intercept.py returns; that function is the first step.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"call to row": 12, "name to kernel": 36}

Numbers = dict[str, float]
Details = dict[str, list[str]]


def _module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _files(places: Iterable[str]) -> set[str]:
    return {place.rsplit(":", 1)[0] for place in places}


class Walk:
    """Follows a value through the calls of a running program, and lists its stops in the order of
    their first calls.

    skip: rooms whose functions are no stops.
    """

    def __init__(self, skip: tuple[str, ...] = ()) -> None:
        self.stops: dict[str, bool] = {}  # -> whether it hands the value on
        self._skip = skip
        self._followed: dict[int, object] = {}  # the values too, so that no identity is used again
        # frames that hold a followed value -> their stop
        self._running: dict[FrameType, str | None] = {}
        self._generators: set[FrameType] = set()  # they are entered again whenever they go on

    def follow(self, value: object) -> None:
        """Follow a value, and the objects of ours that it holds."""
        self._followed[id(value)] = value
        if _ours(value):
            for part in _held(value):
                if _ours(part) and id(part) not in self._followed:
                    self.follow(part)

    def enter(self, frame: FrameType) -> None:
        """A function begins."""
        code = frame.f_code
        if frame in self._generators or not (_place(frame) or _makes_ours(frame)):
            return
        if code.co_flags & 0x20:  # CO_GENERATOR
            self._generators.add(frame)
        count = (
            code.co_argcount
            + code.co_kwonlyargcount
            + bool(code.co_flags & 4)
            + bool(code.co_flags & 8)
        )
        given = [
            frame.f_locals.get(name)
            for name in code.co_varnames[:count]
            if name not in ("self", "cls")
        ]
        given += [
            inner for value in given if isinstance(value, tuple | dict) for inner in _held(value)
        ]
        receiver = frame.f_locals.get("self")
        stop = None
        if any(map(self._followed_or_held, given)):
            caller = _caller(frame)
            outside = caller is None or caller.f_code.co_filename != code.co_filename
            if _place(frame) and outside and not _place(frame).startswith(self._skip):
                stop = f"{_place(frame)}: {code.co_qualname}"
                self.stops.setdefault(stop, False)
                self.stops[stop] |= _ours(receiver)
                for other in self._running.values():
                    if other is not None and other != stop:
                        self.stops[other] = True
        elif not self._followed_or_held(receiver):
            return
        self._running[frame] = stop

    def leave(self, frame: FrameType, returned: object) -> None:
        """A function ends: what it returns is made of the value, and its receiver may keep it."""
        if frame not in self._running:
            return
        stop = self._running.pop(frame)
        made = [one for one in (returned, *_held(returned)) if _ours(one)]
        if stop is not None and made:
            self.stops[stop] = True
        if _ours(receiver := frame.f_locals.get("self")):
            made.append(receiver)
        for one in made:
            self.follow(one)

    def read(self, returned: object) -> None:
        """A function of the store ends: a report with a case of the name of a followed one is
        followed.
        """
        found: list[Any] = [one for one in self._followed.values() if type(one).__name__ == "Case"]
        written = {one.name for one in found}
        for one in _held(returned) if written else ():
            cases = [part for part in _held(one) if _ours(one) and type(part).__name__ == "Case"]
            if any(case.name in written for case in cases):  # type: ignore[attr-defined]
                self.follow(one)

    def _followed_or_held(self, value: object) -> bool:
        inner = _held(value) if _ours(value) or isinstance(value, tuple | list | dict) else ()
        return id(value) in self._followed or any(id(part) in self._followed for part in inner)


def _held(value: object) -> Iterator[object]:
    """What an object of ours, or a container, holds; one level, and the elements of containers in
    attributes.
    """
    if isinstance(value, tuple | list):
        yield from value
    elif isinstance(value, dict):
        yield from list(value.values())
    elif _ours(value):
        for part in list(getattr(value, "__dict__", {}).values()):
            yield part
            if isinstance(part, tuple | list | dict):
                yield from _held(part)


def _ours(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "ssdprof"


def _place(frame: FrameType) -> str:
    """The frame's file, relative to the package; empty if it is not ours.  Lambdas and
    comprehensions are not.
    """
    inside = (
        ""
        if frame.f_code.co_name.startswith("<")
        else frame.f_code.co_filename.partition(f"{ROOT}/ssdprof/")[2]
    )
    return inside


def _makes_ours(frame: FrameType) -> bool:
    """Whether it is an `__init__` that a dataclass or pydantic gives to a class of ours."""
    return frame.f_code.co_name == "__init__" and _ours(frame.f_locals.get("self"))


def _caller(frame: FrameType) -> FrameType | None:
    back = frame.f_back
    while back is not None and not back.f_code.co_filename.startswith(f"{ROOT}/ssdprof/"):
        back = back.f_back
    return back


def walks() -> Details:
    """The stops of both ways, on a run of the SSD demo: 12 tokens, its first layer, one
    precision.
    """
    from ssdprof.cli import app

    name = "".join(("de", "mo"))  # a string of its own, not the literal of another module
    of_name, of_call = Walk(), Walk(skip=("kernels/", "operators/"))
    of_name.follow(name)
    way = {"name to kernel": of_name, "call to row": of_call}
    begun = False

    def profile(frame: FrameType, event: str, returned: Any) -> None:
        nonlocal begun
        if event not in ("call", "return"):
            return
        place = _place(frame)
        if event == "call":
            if frame.f_code.co_qualname == "GridExecutor.__call__":  # of Triton's interpreter
                way.pop("name to kernel", None)
            for walk in way.values():
                walk.enter(frame)
            if place.startswith("report/") and any(
                stop.startswith("report/") for stop in of_call.stops
            ):
                way.pop("call to row", None)
        else:
            for walk in way.values():
                walk.leave(frame, returned)
                if place == "store/reports.py":
                    walk.read(returned)
            if not begun and place.startswith("capture/intercept") and _is_captured(returned):
                begun = True
                of_call.follow(returned)
                of_call.stops[f"{place}: {frame.f_code.co_qualname}"] = True
        if not way:
            sys.setprofile(None)

    words = [
        "run",
        name,
        "--seq",
        "12",
        "--layers",
        "first:1",
        "--dtypes",
        "exact",
        "--states",
        "fp32",
    ]
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        os.chdir(folder)
        try:
            sys.setprofile(profile)
            app(words, prog_name="ssdprof", standalone_mode=False)
        finally:
            sys.setprofile(None)
            os.chdir(here)
    assert not way, f"{', '.join(way)}: the run ended before the end of the way"
    *steps, row = of_call.stops
    return {
        "call to row": [*(stop for stop in steps if of_call.stops[stop]), row],
        "name to kernel": list(of_name.stops),
    }


def _is_captured(value: object) -> bool:
    """Whether it is an object of ours that holds real tensors: predictions of memory run on the
    meta device.
    """
    if not _ours(value):
        return False
    parts = [
        inner for part in _held(value) for inner in (part, *(_held(part) if _ours(part) else ()))
    ]
    tensors: list[Any] = [part for part in parts if type(part).__name__ == "Tensor"]
    devices = {str(tensor.device) for tensor in tensors}
    return bool(devices) and "meta" not in devices


def main() -> int:
    ways = walks()
    for name, stops in ways.items():
        print(f"{name}: {len(stops)}, limit {LIMITS[name]}", *stops, sep="\n  ", end="\n\n")
    longer = any(len(stops) > LIMITS[name] for name, stops in ways.items())
    return int("--limits" in sys.argv and longer)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
