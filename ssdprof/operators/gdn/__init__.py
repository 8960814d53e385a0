"""The gated delta rule of Gated DeltaNet."""

from ssdprof.operators.outline import Outline

OUTLINE = Outline(name="gdn", title="GDN (capture only)", layers="Gated-DeltaNet")
