# mypy: ignore-errors
"""The arguments of a program's roles: its work, which is one or more segments, and other fields of an aggregate.

Each operator has an aggregate of its own for a segment and for all arguments of a role, because the order of its fields
is that of the arguments in machine code.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

STAGES = {"segments": "ticket", "segment_at": "ticket", "chunks": "ticket"}


class OneSegment:
    """Methods of a segment that is the whole work of its program."""

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


@gluon.constexpr_function
def field(value):
    """A field of an aggregate: None and whole numbers, also in tuples, as constants."""
    if isinstance(value, gl.tuple):
        return gl.tuple([field(one) for one in value])
    return gl.constexpr(value) if value is None or isinstance(value, int) else value
