# mypy: ignore-errors
"""The arguments of a program's roles: aggregates, and the interface of the program's work, one or more segments.

Each operator has an aggregate of its own for a segment and for all arguments of a role, because the order of its fields
is that of the arguments in machine code.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate

STAGES = {"segments": "ticket", "segment_at": "ticket", "chunks": "ticket"}


@gluon.constexpr_function
def constants(value):
    """`value` with None and whole numbers, also in tuples, as constants."""
    if isinstance(value, gl.tuple):
        return gl.tuple([constants(one) for one in value])
    return gl.constexpr(value) if value is None or isinstance(value, int) else value


def aggregate(cls: type) -> Any:
    """A Gluon aggregate with a constructor: its annotated fields, in their order or by name, some with defaults."""
    kinds = cls.__annotations__
    defaults = {name: getattr(cls, name) for name in kinds if hasattr(cls, name)}

    @gluon.constexpr_function
    def __init__(self, *values, **named):
        for name, value in (defaults | dict(zip(kinds, values, strict=False)) | named).items():
            setattr(self, name, gl.constexpr(value) if kinds[name] is gl.constexpr else constants(value))

    cls.__init__ = __init__
    return _aggregate(cls)


class OneSegment:
    """Methods of a segment that is the whole work of its program.  An aggregate cannot inherit them in Triton 3.9."""

    @gluon.jit
    def segments(self):
        return 1

    @gluon.jit
    def segment_at(self, k):  # noqa: ARG002
        """The program's k-th segment, and the number of the program's chunks before it."""
        return self, 0

    @gluon.jit
    def chunks(self):
        """Chunks of all segments, without first passes."""
        return self.nchunks
