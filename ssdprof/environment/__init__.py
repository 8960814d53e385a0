"""The machine of a measurement: its hardware and versions, its clocks, and what it lacks."""

from ssdprof.environment.checks import Check, doctor
from ssdprof.environment.clocks import ClockWatch
from ssdprof.environment.machine import collect

__all__ = ["Check", "ClockWatch", "collect", "doctor"]
