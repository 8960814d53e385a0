"""Kimi Delta Attention token by token: the kernels of GDN (`../gdn/recurrent.py`), with a decay for every channel."""

from dataclasses import replace

from ssdprof.kernels import registry
from ssdprof.kernels.gdn import recurrent as of_gdn

for _name in ("recurrent", of_gdn._STEP):
    registry.register(replace(registry.get("gdn", _name), operator="kda"))
