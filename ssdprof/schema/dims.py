"""The sizes of an operator's call."""

from __future__ import annotations

from ssdprof.schema.base import DType, Record


class Dims(Record):
    """The sizes of one call.

    sizes: by the operator's own names, such as "nheads".  words: the same for people, "80 heads x 64, state 128".
    chunk_size: positions per chunk of the model's algorithm; None if it has no chunks.
    dtype: of the inputs with a position axis.
    """

    operator: str
    batch: int
    seqlen: int
    chunk_size: int | None
    dtype: DType
    sizes: dict[str, int]
    words: str

    def __str__(self) -> str:
        chunk = "" if self.chunk_size is None else f", chunk {self.chunk_size}"
        return f"{self.words}{chunk}, {self.dtype}"
