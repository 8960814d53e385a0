"""The records that stages exchange and store as JSON.  Imports no torch.

checkpoint -> capture -> replay -> measure -> report.  Shapes use the letters of `docs/glossary.md`; units are in the
names.  The records of stalls are in `schema.stalls`, that of `--dry-run` in `schema.plan`.
"""

from ssdprof.schema.accuracy import SLICES, TOLERANCES, Deviation, Match, TensorAccuracy
from ssdprof.schema.answers import AnswerCase, AnswerGate, Answers
from ssdprof.schema.base import (
    EXACT_FP32,
    SCHEMA_VERSION,
    DType,
    Fault,
    Intermediates,
    PrecisionRecord,
    Record,
    Status,
    StoredDType,
    precisions_for,
)
from ssdprof.schema.capture import CaptureManifest, LayerCapture, TensorRecord
from ssdprof.schema.checkpoint import CheckpointRef, LayerRef, Prompt
from ssdprof.schema.dims import Dims
from ssdprof.schema.gates import NO_GATES, Gates
from ssdprof.schema.machine import Clocks, Environment, Gpu
from ssdprof.schema.run import Asked, CaseResult, Cast, Participant, RunReport, StepsAsked
from ssdprof.schema.serving import CallRef, Serving
from ssdprof.schema.speed import (
    Ceilings,
    Interval,
    Launch,
    Memory,
    Roofline,
    Speedup,
    Spread,
    Timing,
    Verdict,
    WarmSpeedup,
    WarmTiming,
)

__all__ = [
    "EXACT_FP32",
    "NO_GATES",
    "SCHEMA_VERSION",
    "SLICES",
    "TOLERANCES",
    "AnswerCase",
    "AnswerGate",
    "Answers",
    "Asked",
    "CallRef",
    "CaptureManifest",
    "CaseResult",
    "Cast",
    "Ceilings",
    "CheckpointRef",
    "Clocks",
    "DType",
    "Deviation",
    "Dims",
    "Environment",
    "Fault",
    "Gates",
    "Gpu",
    "Intermediates",
    "Interval",
    "Launch",
    "LayerCapture",
    "LayerRef",
    "Match",
    "Memory",
    "Participant",
    "PrecisionRecord",
    "Prompt",
    "Record",
    "Roofline",
    "RunReport",
    "Serving",
    "Speedup",
    "Spread",
    "Status",
    "StepsAsked",
    "StoredDType",
    "TensorAccuracy",
    "TensorRecord",
    "Timing",
    "Verdict",
    "WarmSpeedup",
    "WarmTiming",
    "precisions_for",
]
