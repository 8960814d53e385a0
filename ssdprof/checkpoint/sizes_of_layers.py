"""The sizes of one layer of a model, for configs, `bench` and dry runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SSDSizes:
    """x is (b, l, nheads, headdim), B and C are (b, l, ngroups, dstate)."""

    nheads: int
    headdim: int
    dstate: int
    ngroups: int

    def __str__(self) -> str:
        return f"{self.nheads}x{self.headdim}, N {self.dstate}, G {self.ngroups}"


@dataclass(frozen=True, kw_only=True)
class GDNSizes:
    """q and k are (B, T, key_heads, key_dim), v is (B, T, value_heads, value_dim)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __str__(self) -> str:
        return f"{self.key_heads}/{self.value_heads} heads, K {self.key_dim}, V {self.value_dim}"
